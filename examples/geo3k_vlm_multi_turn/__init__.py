"""Qwen3-VL on geo3k over several turns, on Ascend NPUs, by GRPO or PPO.

training   the arguments of slime for both algorithms, at every release of slime we follow
rollout    what a rollout does: the turns, the tool, the reward
dataset    geo3k as the parquet that slime reads
run        the command line behind the two scripts
"""
