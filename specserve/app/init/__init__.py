"""``specserve init``: a config from what people have.

Text of many kinds (``source``) becomes launches (``found``): the words of one server's command and
its environment. An engine's arguments become keys of ours (``vllm``, ``others``), and keys become a
commented file (``write``). Nothing that is read is executed.
"""
