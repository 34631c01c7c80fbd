"""Waiting time for one of several servers: the M/G/c approximation, as pure arithmetic.

Erlang's C gives the probability of waiting; waits are then exponential (Allen and Cunneen; Tijms, "A First Course
in Stochastic Models", ch. 9). Exact for exponential service times, and for c = 1 in the mean (Pollaczek-Khinchine).
"""

import math


def waiting_chance(num_servers: int, offered: float) -> float:
    """Erlang C: share of arrivals that find all servers busy. `offered`: mean number of servers kept busy."""
    if offered <= 0:
        return 0.0
    if offered >= num_servers:
        return 1.0
    blocked = 1.0
    for number in range(1, num_servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return num_servers * blocked / (num_servers - offered * (1 - blocked))


def mean_wait(num_servers: int, offered: float, service: float, variation: float) -> float:
    """Mean wait in the unit of `service` (its mean time; `variation`: its standard deviation over its mean)."""
    if offered >= num_servers:
        return math.inf
    return waiting_chance(num_servers, offered) * _longer(num_servers, offered, service, variation)


def wait_quantile(num_servers: int, offered: float, service: float, variation: float, share: float) -> float:
    """The wait that `share` of all arrivals do not exceed."""
    if offered >= num_servers:
        return math.inf
    chance = waiting_chance(num_servers, offered)
    if chance <= 1 - share:
        return 0.0
    return _longer(num_servers, offered, service, variation) * math.log(chance / (1 - share))


def _longer(num_servers: int, offered: float, service: float, variation: float) -> float:
    """Mean wait of the arrivals that have to wait."""
    return service * (1 + variation**2) / 2 / (num_servers - offered)
