"""forkman: keeps hardware forks of fast-moving projects alive while their upstreams move."""
