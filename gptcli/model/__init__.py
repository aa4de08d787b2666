"""The maths: the only folder that imports torch at module level."""
