"""Small experiments, run by the engine on a Spec made for each, with what they depend on open to change.

A room an experiment: it makes a Spec and its weights, lets forward run and a recorder watch, and says in one line what
there is to see, in the numbers of this run. torch is loaded by the experiment that needs it.
"""
