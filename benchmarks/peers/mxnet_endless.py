"""Pushes and pulls a key for ever, in a job that ``DMLC_`` variables describe: ``STORE``, by its name in MXNet.

Schedulers and servers run it, too: for them the import of MXNet, or of the adapter, does not return.
"""

from __future__ import annotations

import importlib

from mxnet_job import OWN, load, run_program


def main(store: str) -> None:
    """Says when the first pull has come."""
    if store != OWN:
        importlib.import_module("tensorwire.mxnet")  # before MXNet
    mx = load()
    kv = mx.kv.create(store)
    pushed, out = mx.nd.ones((1024,)), mx.nd.zeros((1024,))
    kv.init("key", out)
    said = False
    while True:
        kv.push("key", pushed)
        kv.pull("key", out=out)
        out.wait_to_read()
        if not said:
            print("ready", flush=True)
            said = True


if __name__ == "__main__":
    run_program(main)
