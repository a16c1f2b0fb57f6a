"""The planner: a recipe's memory and time before it runs, and the settings that fit.

    rehearsal    one real step of a real recipe on shapes
    world        what a recipe gets instead of weights, data and a device
    trace        the memory, time and traffic of the step's operations
    search       the fastest settings that fit a budget, the savings of each technique, and adapters
    known_plans  plans that were made before
    beforehand   the estimate before a run loads weights, and advice after it ran out of memory
    devices      facts about cards and CPUs

Nothing is imported here, so that a run that imports `beforehand` does not hold the tracer in memory.
"""
