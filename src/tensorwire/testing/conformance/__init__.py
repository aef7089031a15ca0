"""The conformance suite: a device that passes keeps the contract. See docs/testing.md."""
