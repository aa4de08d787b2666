"""Two sides of one computation, compared activation by activation: where they part, and why.

A side is a Run: a model with ids, a trace's file, someone's own arrays, another library on the same checkpoint.
"""
