"""What would have happened: recorded traffic read, replayed through the simulator, and shown.

    trace, rates     requests with their times; windows with a rate, from which requests are drawn
    rows             lines of a file, and how a bad one is refused
    azure_llm, azure_functions, mooncake, servegen, own_traffic   the formats
    formats          which of them a file has

Nothing here is imported by a running control plane.
"""
