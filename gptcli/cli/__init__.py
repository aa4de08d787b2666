"""The command line: parse, call one function, render. No maths, no torch."""
