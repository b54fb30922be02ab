"""Linear attention over sequences that several ranks share: the state passes from span to span, not the tokens.

A span is a run of consecutive positions on one rank. Every span is an affine map of the state before it,
S_out = A S_in + B; ranks exchange (A, B) once per layer and direction, whatever the length of the sequence.

    gated_delta_rule(DeltaInputs(q, k, v, g, beta), context.linear)     Gated DeltaNet; KDA with a gate per channel
    causal_conv1d(x, weight, bias, context.linear)                      the short convolution in front of it
"""

from engine.attention.linear.convolution import causal_conv1d
from engine.attention.linear.delta_rule import gated_delta_rule
from engine.attention.linear.rule import DeltaInputs
from engine.attention.linear.sequence import LinearSequence

__all__ = ["DeltaInputs", "LinearSequence", "causal_conv1d", "gated_delta_rule"]
