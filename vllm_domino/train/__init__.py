"""Training: a frozen target in, a Domino, DFlash or EAGLE-3 checkpoint in the public layout out.

Read in this order: `recipe` (what a run is), `blocks` (anchors, masks, labels), `losses`, `loop`; `tiny` is
the one command that makes the shipped pair.
"""
