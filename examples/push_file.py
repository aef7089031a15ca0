"""Pushes to a key of a running job, with numpy alone: the job's rule is applied once. JOB is its name:

python examples/push_file.py JOB

In a mounted job the same is: cp gradient job/push/w
"""

import sys

import numpy as np

import tensorwire as tw

with tw.files.connect(sys.argv[1]) as folder:
    with folder.open("params/w.npy") as file:
        before = np.load(file)
    with folder.open("push/w", "wb") as file:
        file.write(np.ones_like(before))
    print(f"pushed ones to w, {list(before.shape)} {before.dtype}; the version before had {before.ravel()[:3]} ...")
