#!/usr/bin/env python3
"""What nvcc made of the kernels: registers, shared memory, occupancy, 128-bit accesses, tensor cores. No GPU needed.

  kernel_table.py CUOBJDUMP OBJECT.cu.o... [--arch 90] [--out test/simt/kernels.md]

Writes the table, and fails where a kernel uses local memory, an instantiation for packs has no 128-bit load and store,
or one that multiplies in bf16 has no tensor core instruction. `make kernel-table` runs it on all kernels.
"""
import argparse
import os
import re
import subprocess
import sys

# Kernels that may use local memory, and why.
LOCAL_MEMORY_ACCEPTED = {"rope_table_kernel": "the argument reduction of cosf and sinf for large angles"}
# Kernels of packs whose results are narrower than 128 bits, and why.
NARROW_ACCEPTED = {
    "column_sums_kernel": "the results are sums, a number a thread",
    "sum_of_squares_kernel": "the result is a number a block",
    "attention_sink_gradient_kernel": "the same",
    "qk_norm_backward_kernel": "nvcc 13.0 cuts the store of a pack into four of 32 bits; whole by PTX, the forward spills",
    "ulysses_unpack_dqkv_kernel": "the same",
    "route_bias_weights_kernel": "the result is a number a row",
    "grouped_weights_kernel": "4 lanes write 32 bytes side by side, as the tensor cores leave their sums",
}
# Kernels that multiply matrices.
MATRIX_KERNELS = {
    "attention_forward_kernel",
    "attention_backward_queries_kernel",
    "attention_backward_keys_kernel",
    "grouped_rows_kernel",
    "grouped_weights_kernel",
    "tensor_core_check_kernel",
}
REGISTERS_PER_SM, MAX_WARPS_PER_SM = 65536, 64


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def resources(cuobjdump, obj, arch):
    """{mangled name: (registers, static shared bytes, stack bytes)}"""
    found = {}
    name = None
    for line in run(cuobjdump, "-arch", f"sm_{arch}", "-res-usage", obj).splitlines():
        if match := re.match(r"\s*Function (\S+):", line):
            name = match.group(1)
        elif name and (match := re.match(r"\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)", line)):
            found[name] = (int(match.group(1)), int(match.group(3)), int(match.group(2)))
            name = None
    return found


def instructions(cuobjdump, obj, arch):
    """{mangled name: [opcodes]}"""
    found = {}
    name = None
    for line in run(cuobjdump, "-arch", f"sm_{arch}", "-sass", obj).splitlines():
        if match := re.match(r"\s*Function : (\S+)", line):
            name = match.group(1)
            found[name] = []
        elif name and (match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line)):
            found[name].append(match.group(1))
    return found


def readable(mangled):
    name = run("c++filt", mangled).strip().replace("(anonymous namespace)::", "")
    name = re.sub(r"\(\w+\)(?=\d)", "", name)  # (GateKind)2
    return re.sub(r"\(.*$", "", name).removeprefix("void ")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cuobjdump")
    parser.add_argument("objects", nargs="+")
    parser.add_argument("--arch", default="90")
    parser.add_argument("--out")
    args = parser.parse_args()
    os.environ["PATH"] = os.path.dirname(os.path.abspath(args.cuobjdump)) + ":" + os.environ["PATH"]  # nvdisasm

    rows, problems = [], []
    for obj in sorted(args.objects):
        file = "/".join(obj.split("/")[-2:]).removesuffix(".o")
        code = instructions(args.cuobjdump, obj, args.arch)
        for mangled, (registers, shared, stack) in resources(args.cuobjdump, obj, args.arch).items():
            name = readable(mangled)
            base = name.split("<")[0]
            ops = code.get(mangled, [])
            count = lambda pattern: sum(bool(re.match(pattern, op)) for op in ops)  # noqa: E731
            wide_loads, wide_stores = count(r"(LDG?|LDGSTS)\.E.*\.128"), count(r"STG?\.E.*\.128")
            tensor, local = count("HMMA"), count("LDL|STL")
            warps = min(MAX_WARPS_PER_SM, REGISTERS_PER_SM // (32 * max(8, (registers + 7) // 8 * 8)))
            rows.append((file, name, registers, shared, warps, wide_loads, wide_stores, tensor, local))
            if local and base not in LOCAL_MEMORY_ACCEPTED:
                problems.append(f"{file}: {name} uses local memory ({local} instructions, {stack} bytes of stack)")
            is_packed = re.search(r"<(float, )*float, 4\b|<(bf16, )*bf16, 8\b", name)
            if is_packed and not (wide_loads and wide_stores) and base not in NARROW_ACCEPTED:
                problems.append(f"{file}: {name} has {wide_loads} loads and {wide_stores} stores of 128 bits")
            if base in MATRIX_KERNELS and re.search("MmaEngine|<bf16", name) and not tensor:
                problems.append(f"{file}: {name} does not use the tensor cores")

    lines = [
        "# Kernels as nvcc made them",
        "",
        f"`make kernel-table` (sm_{args.arch}). Warps: what registers alone allow of the {MAX_WARPS_PER_SM} of a "
        "multiprocessor; dynamic shared memory is in each file's header.",
        "",
        "| file | kernel | registers | static shared | warps | 128-bit loads | stores | HMMA | local |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    lines += ["", "Local memory is accepted in: " + "; ".join(f"{k} ({v})" for k, v in LOCAL_MEMORY_ACCEPTED.items()) + "."]
    if args.out:
        with open(args.out, "w") as out:
            out.write("\n".join(lines) + "\n")
    print(f"{len(rows)} kernels, {len(problems)} problems")
    for problem in problems:
        print("kernel_table: " + problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
