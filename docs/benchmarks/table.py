#!/usr/bin/env python3
"""Makes the table of README.md from raw rows: table.py [--ours fv] FILE.jsonl ...

One JSON object a line: impl, work, rep and what was measured. Medians over the repetitions; the last column is ours
against the best of the others in that line.
"""
import json
import statistics
import sys

# What is shown of which work: the field, its name, and whether more is better.
SHOWN = [
    ("tcp1", "mbps", "TCP, 1 flow, Mbit/s", True),
    ("tcp4", "mbps", "TCP, 4 flows, Mbit/s", True),
    ("tcp1r", "mbps", "TCP, 1 flow back, Mbit/s", True),
    ("bidir", "mbps", "TCP, both ways at once, Mbit/s", True),
    ("fwd4", "mbps", "TCP, 4 flows from a LAN behind, Mbit/s", True),
    ("tcp1", "machine_s_gbit", "TCP, 1 flow: CPU seconds of the machine per Gbit", False),
    ("tcp1", "user_s_gbit", "TCP, 1 flow: user seconds of both ends per Gbit", False),
    ("ndr64x16", "kpps", "UDP 64 B, 16 flows, without loss, 1000 packets/s", True),
    ("ndr1380x16", "kpps", "UDP 1380 B, 16 flows, without loss, 1000 packets/s", True),
    ("pps64x16", "kpps", "UDP 64 B, 16 flows, delivered under overload, 1000 packets/s", True),
    ("pps1380x16", "kpps", "UDP 1380 B, 16 flows, delivered under overload, 1000 packets/s", True),
    ("pps64x16@200000", "proc_us_pkt", "200 000 packets/s of 64 B: CPU microseconds of both ends per packet", False),
    ("pps64x16@20000", "machine_us_pkt", "20 000 packets/s: CPU microseconds of the machine per packet", False),
    ("rtt", "p50_us", "round trip, idle, median, us", False),
    ("rtt", "p99_us", "round trip, idle, p99, us", False),
    ("rttload", "p99_us", "round trip beside 200 Mbit/s, p99, us", False),
    ("*", "rss_mb", "most memory in any of these, both ends, MB", False),
]


def main():
    arguments = sys.argv[1:]
    ours = "fv"
    if arguments[:1] == ["--ours"]:
        ours, arguments = arguments[1], arguments[2:]
    samples, impls = {}, []
    for path in arguments:
        for line in open(path, encoding="utf-8"):
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            impl = row["impl"]
            if impl not in impls:
                impls.append(impl)
            for field, value in row.items():
                if isinstance(value, (int, float)) and field != "rep":
                    samples.setdefault((row.get("work"), field, impl), []).append(value)
                    samples.setdefault(("*", field, impl), []).append(value)
    print("| | " + " | ".join(impls) + " | ours / best peer |")
    print("|--|" + "--:|" * (len(impls) + 1))
    for work, field, name, more in SHOWN:
        found = {i: samples.get((work, field, i)) for i in impls}
        middle = {i: max(v) if work == "*" else statistics.median(v) for i, v in found.items() if v}
        peers = [v for i, v in middle.items() if not i.startswith(ours) and i != "none" and v]
        if ours not in middle or not peers:
            continue
        best = max(peers) if more else min(peers)
        cells = [f"{middle[i]:.4g}" if i in middle else "–" for i in impls]
        print(f"| {name} | " + " | ".join(cells) + f" | {middle[ours] / best:.2f} |")


if __name__ == "__main__":
    main()
