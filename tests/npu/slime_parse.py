"""Parses slime's arguments with slime's own parser, as train.py does, and prints what came of them.

Run by test_examples.py with one patched stack on the path, on simulated NPUs: what follows is
train.py's command line. Newer releases of slime pass over a flag that none of its parsers knows, so
each flag is looked up in the parsers that slime made; abbreviations do not count.
"""

import argparse
import json
import sys

import absent


def main():
    absent.torchair()
    absent.torchvision()
    absent.sgl_kernels()
    known = set()
    parse = argparse.ArgumentParser.parse_known_args

    def recorded(parser, *args, **kwargs):
        known.update(parser._option_string_actions)
        return parse(parser, *args, **kwargs)

    argparse.ArgumentParser.parse_known_args = recorded
    from slime.utils.arguments import parse_args

    args = parse_args()
    found = {
        "unknown": [word for word in sys.argv[1:] if word.startswith("--") and word not in known],
        "values": {n: v for n, v in vars(args).items() if isinstance(v, (int, float, str, list))},
    }
    if getattr(args, "megatron_config_path", None):
        from slime.utils.arguments import parse_megatron_role_args

        critic = parse_megatron_role_args(args, args.megatron_config_path, role="critic")
        found["values"]["critic_lr"] = critic.lr
    print(json.dumps(found))


if __name__ == "__main__":
    main()
