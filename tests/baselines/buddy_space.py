"""A buddy allocator over a pool of any length, by Knuth's rule (TAOCP 1, 2.5): of the smallest free
areas that are long enough the lowest is halved until it fits, and freed halves join again.
"""


def power_of_two(number):
    """The smallest that is not below `number`."""
    power = 1
    while power < number:
        power *= 2
    return power


class BuddySpace:
    def __init__(self, num_blocks):
        self.free, start = [], 0  # areas as (length, start)
        for length in (2**i for i in reversed(range(num_blocks.bit_length()))):
            if start + length <= num_blocks:
                self.free.append((length, start))
                start += length
        self.largest = list(self.free)  # nothing joins beyond what the pool was cut into

    def take(self, num_blocks):
        fitting = [area for area in self.free if area[0] >= num_blocks]
        if not fitting:
            return None
        length, start = min(fitting)
        self.free.remove((length, start))
        while length >= 2 * num_blocks:
            length //= 2
            self.free.append((length, start + length))
        return length, start

    def give_back(self, area):
        length, start = area
        while (length, start) not in self.largest and (length, start ^ length) in self.free:
            self.free.remove((length, start ^ length))
            length, start = 2 * length, min(start, start ^ length)
        self.free.append((length, start))
