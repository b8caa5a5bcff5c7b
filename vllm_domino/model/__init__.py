"""The drafter in plain PyTorch: the reference that every export and engine is checked against.

Shape letters used through the project:
    B requests   N context rows   S context length   T block size   K draft tokens   Q query rows
    F target layers   L draft layers   H hidden   Hq / Hkv query and K/V heads   D head size
    V vocabulary   R rank of the correction   G GRU width   C candidate pool
"""
