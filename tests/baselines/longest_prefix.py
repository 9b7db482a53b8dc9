"""SGLang's longest prefix match: the order in which requests enter."""


def longest_prefix_first(waiting, pool, num_shared):
    """By cached tokens; who shares more than `num_shared` others with one ahead waits for it."""
    cached = {task: len(pool.find(task)) for task in waiting}
    ahead = []
    for task in sorted(waiting, key=lambda task: (-cached[task], task.number)):
        least = cached[task] + num_shared + 1
        alike = [beginning(other, least) for other in ahead]
        if beginning(task, least) is None or beginning(task, least) not in alike:
            ahead.append(task)
    return ahead


def beginning(task, num_tokens):
    return task.job.tokens[:num_tokens] if num_tokens <= task.job.prompt else None
