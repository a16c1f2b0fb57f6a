"""The planner: what a recipe takes, known before it runs, and which settings fit.

    rehearsal    one real step of a real recipe, on shapes alone
    search       the fastest settings that fit a budget, and what each technique would save
    beforehand   what a run says of itself before it loads weights, and after it ran out of memory
    devices      what is known of cards and CPUs

Nothing is imported here: a run that asks `beforehand` must not carry the tracer in its own memory.
"""
