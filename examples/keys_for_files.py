"""Keys that other processes push to, by examples/push_file.py or a mount:

tensorwire run --workers 1 --servers 1 -- python examples/keys_for_files.py
"""

import sys
import time

import numpy as np

import tensorwire as tw

job = tw.init()
kv = tw.store.KeyValue(tw.store.Async(), "sum", publish=True)
kv.init("w", np.zeros((2, 3), "f4"))
print(f"job {job.name}", flush=True)

end = time.monotonic() + (float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
last = 0.0
while time.monotonic() < end:
    kv.publish()
    total = float(kv.pull("w").wait().sum())
    if total != last:
        print(f"the elements of w add up to {total:g}", flush=True)
        last = total
    time.sleep(0.2)
