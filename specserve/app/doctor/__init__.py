"""``specserve doctor``: causes from a config, a log, a server, a sidecar and a profile, in the
order of the field guide.

No rule stands here: what is wrong is decided by the checks, the plan, the table of failure signs,
the alert rules and the canary. What is here is where each of them belongs in the tree, and how sure
it is.
"""
