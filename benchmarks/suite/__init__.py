"""What VUA can do on a machine, in the numbers C1 to C14: ratios measured in one run.

Every number is a ratio whose denominator was measured in the same run: the arms of a case take
turns, the medians and quartiles over the rounds are reported, and the denominator's own work is run
once more as an arm that must come out at 1 (its distance from 1 is the noise). What the arms bring
is compared with what was stored. What a machine cannot measure is reported as unmeasured, with the
reason. `suite.run` names the numbers, docs/performance.md has results; `dev.py bench` runs it.
"""
