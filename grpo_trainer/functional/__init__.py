"""The mathematics of the objective: pure functions of tensors. Nothing here knows a model, a config or a process group.

Each variant is a function; its knobs are its keyword arguments; its name is one line in the table at the end of its
module.
"""
