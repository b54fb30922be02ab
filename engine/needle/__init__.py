"""Needle in a haystack: does a model use what it read long ago? (Kamradt 2023: a fact hidden in a long text.)

tasks.py      texts with a hidden sentence and a question, exactly as long as a sequence; no torch
evaluate.py   the model asked, over all ranks
"""
