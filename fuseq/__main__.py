"""`python -m fuseq` is the console script."""

from fuseq.cli import main

if __name__ == "__main__":
    main()
