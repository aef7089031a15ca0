"""A program, ``python -m tests.gpu``: the store on a real accelerator, whether it is right and how fast it is."""
