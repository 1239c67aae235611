"""fuseq measured beside the engines that one could pick instead: same weights, same machine, same run."""
