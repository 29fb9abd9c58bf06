#!/usr/bin/env python3
"""Measures what two GPUs of a host carry between them by NCCL; part of gpu-bundle/ as links.py.

    links.py [--seconds N] [--blocks auto,4,8,16,32] [--megabytes 1,4,16,64,256,1024] [--memory plain,registered]
             [--json FILE]

Transfers are those of PyTorch's NCCL: an all-gather, a reduce-scatter, and a send beside a receive, which is what
Foveate moves. Each with as many thread blocks as NCCL likes and with at most so many, as `mesh.nccl_blocks` says it
(least 1, most N), and with arrays

    plain       of the allocator, which NCCL does not know of
    registered  of ncclMemAlloc, registered with the communicator (ncclCommRegister)
    window      the same, registered by both ranks at once (ncclCommWindowRegister), for NCCL's symmetric kernels;
                only where --memory names it

A size is the bytes that each GPU sends, and as many arrive: an all-gather of 1 GiB leaves 2 GiB on each. A row has a
rate for each size, in GB/s each way, medians of a few transfers, by the clock of the device. Then the same transfers
beside a product of 8,192 x 8,192 matrices in bf16, over and over: what each loses to the other.

--seconds bounds all of it (30): rows that are left then are told of, none begins. Rows are printed as they come.
NVLink multicast stays off (NCCL_NVLS_ENABLE=0) unless the environment says otherwise. Without two GPUs or PyTorch it
says so and passes. `--device cpu` tries the same by gloo with tiny sizes: nothing that it prints is a measurement.
"""

import argparse
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time

KINDS = ("all-gather", "reduce-scatter", "send and receive")
MEMORY = ("plain", "registered", "window")
SIZE = 8192  # of the product's matrices
BESIDE = 256  # MiB of a transfer beside it
PRODUCTS = 40
AHEAD = 8_000_000  # cycles, some 4 ms
LATE_S = 5  # how long the last row may take when the time is over


class Rank:
    """One of two processes, with a GPU of its own."""

    def __init__(self, torch, dist, options, rank):
        self.torch, self.dist, self.options, self.rank = torch, dist, options, rank
        self.on_cpu = options.device == "cpu"
        self.device = torch.device("cpu" if self.on_cpu else f"cuda:{rank}")
        if not self.on_cpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group("gloo" if self.on_cpu else "nccl", init_method=options.meet, rank=rank, world_size=2)
        # What ranks agree on goes past the transfers that are measured.
        self.words = dist.new_group(backend="gloo")
        self.until = options.began + options.seconds
        self.left, self.pool = 0, None
        most = max(options.megabytes) << 20
        self.arrays = {"plain": self.made(most)}

    def made(self, most):
        """Two arrays of as many bytes as the larger side of a transfer has."""
        return [self.torch.zeros(most, dtype=self.torch.bfloat16, device=self.device) for _ in range(2)]

    def say(self, row, line):
        if self.rank == 0:
            print(line, flush=True)
            if self.options.json:
                with open(self.options.json, "a") as file:
                    file.write(json.dumps(row) + "\n")

    def same(self, value):
        """The larger of what both ranks have."""
        value = self.torch.tensor([float(value)])
        self.dist.all_reduce(value, self.dist.ReduceOp.MAX, self.words)
        return value.item()

    def is_late(self):
        """Whether the time is over for either rank; counts the row that is left then."""
        late = self.same(time.time() > self.until) > 0
        self.left += late
        return late

    def group(self, blocks):
        """Both ranks, with at most so many blocks for a transfer."""
        if self.on_cpu:
            return self.dist.new_group()
        options = self.dist.ProcessGroupNCCL.Options()
        if blocks != "auto":
            options.config.min_ctas, options.config.max_ctas = 1, int(blocks)
        group = self.dist.new_group(pg_options=options)
        # Arrays are registered with a communicator that is there.
        self.transfer("send and receive", 1 << 10, group, "plain")()
        self.settle()
        return group

    def settle(self):
        if not self.on_cpu:
            self.torch.cuda.synchronize()

    def transfer(self, kind, size, group, memory):
        """What queues a transfer of `size` bytes each way."""
        first, second = self.arrays[memory]
        elems, dist = size // 2, self.dist
        if kind == "all-gather":
            own, all_of_it = first[:elems], second[: 2 * elems]
            return lambda: dist.all_gather_into_tensor(all_of_it, own, group=group)
        if kind == "reduce-scatter":
            # Gradients are summed in f32.
            terms, part = (array.view(self.torch.float32) for array in (first[: 2 * elems], second[:elems]))
            return lambda: dist.reduce_scatter_tensor(part, terms, group=group)
        peer, own, other = 1 - self.rank, first[:elems], second[:elems]

        def both():
            both_ways = [dist.P2POp(dist.isend, own, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
            for work in dist.batch_isend_irecv(both_ways):
                work.wait()

        return both

    def event(self):
        return self.torch.cuda.Event(enable_timing=True)

    def marked(self, queue, times):
        """Queues it so often; events before each, and behind the last."""
        events = [self.event() for _ in range(times + 1)]
        for event in events[:-1]:
            event.record()
            queue()
        events[-1].record()
        return events

    def took(self, queue, times):
        """Seconds that each of so many calls of `queue` takes, the median, by the device."""
        if self.on_cpu:
            began = time.perf_counter()
            queue()
            return time.perf_counter() - began
        # The host is ahead when the first one begins: it queues more slowly than small transfers run.
        self.torch.cuda._sleep(AHEAD)
        events = self.marked(queue, times)
        self.settle()
        return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:])) / 1e3

    def register(self, group, memory):
        """Has NCCL know the arrays; what forgets them again."""
        if memory == "plain":
            return lambda: None
        torch, backend = self.torch, group._get_backend(self.device)
        if self.pool is None:
            self.pool = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(self.pool):
                self.arrays["registered"] = self.made(max(self.options.megabytes) << 20)
            self.arrays["window"] = self.arrays["registered"]
        backend.register_mem_pool(self.pool, **({"symm": True} if memory == "window" else {}))
        return lambda: backend.deregister_mem_pool(self.pool)

    def rates(self, blocks, group, memory):
        """A row for each kind of transfer: GB/s each way by size."""
        for kind in KINDS:
            if self.is_late():
                continue
            rates = {}
            for megabytes in self.options.megabytes:
                size = megabytes << 20
                queue = self.transfer(kind, size, group, memory)
                queue()
                seconds = self.same(self.took(queue, max(3, min(20, 256 // megabytes))))
                rates[megabytes] = size / seconds / 1e9
            told = " ".join(f"{rate:7.1f}" for rate in rates.values())
            row = {"transfer": kind, "blocks": blocks, "memory": memory, "gb_per_s": rates}
            self.say(row, f"{kind:17} blocks {blocks:>4}, {memory:10} {told}")

    def beside(self, blocks, group, memory):
        """A row for each kind of transfer: what it and products lose to each other."""
        size, side = (1 << 20, 64) if self.on_cpu else (BESIDE << 20, SIZE)
        a, b = (self.torch.full((side, side), 0.01, dtype=self.torch.bfloat16, device=self.device) for _ in range(2))
        product = lambda: self.torch.mm(a, b)
        for kind in KINDS:
            row = {"beside": kind, "blocks": blocks, "memory": memory}
            if self.is_late():
                continue
            queue = self.transfer(kind, size, group, memory)
            queue()
            alone = self.took(product, PRODUCTS), self.took(queue, 8)
            # Transfers have to last longer than the products; the same number on both ranks.
            many = int(self.same(1.5 * PRODUCTS * alone[0] / alone[1])) + 16
            both = alone if self.on_cpu else self.together(product, queue, many)
            if self.same(both is None):
                found = row | {"declined": "ran apart from products"}
                self.say(found, f"{kind:17} blocks {blocks:>4}, {memory:10} {found['declined']}")
                continue
            product_s, transfer_s, product_beside_s, transfer_beside_s = (self.same(s) for s in (*alone, *both))
            tflops = [2 * side**3 / seconds / 1e12 for seconds in (product_s, product_beside_s)]
            rates = [size / seconds / 1e9 for seconds in (transfer_s, transfer_beside_s)]
            row |= {"tflops_alone": tflops[0], "tflops": tflops[1], "gb_per_s_alone": rates[0], "gb_per_s": rates[1]}
            lost = [f"{100 * (beside / alone - 1):+5.1f} %" for alone, beside in (tflops, rates)]
            self.say(row, f"{kind:17} blocks {blocks:>4}, {memory:10} product {tflops[0]:5.0f} to {tflops[1]:5.0f} "
                          f"TFLOP/s ({lost[0]}), transfer {rates[0]:6.1f} to {rates[1]:6.1f} GB/s ({lost[1]})")

    def together(self, product, queue, many):
        """Seconds of a product and of a transfer that run beside each other, by the device; none where none did."""
        began, aside = self.event(), self.torch.cuda.Stream()
        began.record()
        self.settle()
        with self.torch.cuda.stream(aside):
            transfers = self.marked(queue, many)
        products = self.marked(product, PRODUCTS)
        self.settle()
        spans = [[(began.elapsed_time(a), began.elapsed_time(b)) for a, b in zip(marks, marks[1:])]
                 for marks in (products, transfers)]
        since, until = (limit(spans[0][end][end], spans[1][end][end]) for limit, end in ((max, 0), (min, -1)))
        inside = [[b - a for a, b in of if a >= since and b <= until] for of in spans]
        return [statistics.median(of) / 1e3 for of in inside] if all(inside) else None

    def run(self):
        torch, options = self.torch, self.options
        if self.rank == 0 and not self.on_cpu:
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
            print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, NCCL {nccl}, "
                  f"NCCL_NVLS_ENABLE={os.environ['NCCL_NVLS_ENABLE']}; GB/s each way", flush=True)
        groups = {blocks: self.group(blocks) for blocks in options.blocks}
        if self.rank == 0:
            print(f"{'MiB that a GPU sends':43} {' '.join(f'{m:7}' for m in options.megabytes)}", flush=True)
        # What is registered by both ranks at once comes last: where one cannot, the other waits.
        asked = [[how for how in hows if how in options.memory] for hows in (MEMORY[:2], MEMORY[2:])]
        parts = [(part, how) for hows in asked for part in (self.rates, self.beside) for how in hows]
        declined = set()
        for (part, how), (blocks, group) in ((part, group) for part in parts for group in groups.items()):
            if how in declined:
                continue
            try:
                forget = self.register(group, how)
            except Exception as error:  # an older PyTorch or NCCL has none
                declined.add(how)
                why = (str(error) or repr(error)).strip().splitlines()[0][:200]
                self.say({"memory": how, "declined": why}, f"{how} declined: {why}")
                continue
            part(blocks, group, how)
            self.settle()
            forget()
        if self.rank == 0 and self.left:
            print(f"{self.left} rows skipped: {options.seconds:.0f} s were over", flush=True)
        # Communicators that are taken down one by one take seconds.
        os._exit(0)


def arguments():
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--blocks", type=lambda text: text.split(","), default=["auto", "4", "8", "16", "32"])
    parser.add_argument("--megabytes", type=numbers, default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--memory", type=lambda text: text.split(","), default=["plain", "registered"])
    parser.add_argument("--json", help="a file for the rows, an object a line")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [how for how in options.memory if how not in MEMORY]:
        parser.error(f"there is no memory {', '.join(unknown)}; there are {', '.join(MEMORY)}")
    # A processor's memory is not NCCL's to know.
    options.memory = ["plain"] if options.device == "cpu" else options.memory
    return options


def main():
    began, options = time.time(), arguments()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if options.rank is not None:
        import torch
        import torch.distributed as dist

        if options.device == "cuda" and (found := torch.cuda.device_count()) < 2:
            if options.rank == 0:
                print(f"links declined: two GPUs are needed, and there are {found}")
            return 0
        return Rank(torch, dist, options, options.rank).run()
    if importlib.util.find_spec("torch") is None:
        print("links declined: no PyTorch")
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-B", os.path.abspath(__file__), *sys.argv[1:]]
    command += ["--meet", f"tcp://127.0.0.1:{port}", "--began", str(began)]
    ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(2)]

    def end(*_):
        for rank in ranks:
            rank.kill()
        print("links skipped, cut: what was measured stands above", flush=True)
        os._exit(1)

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, end)
    while any(rank.poll() is None for rank in ranks):
        if time.time() > began + options.seconds + LATE_S:
            end()
        if any(rank.poll() not in (None, 0) for rank in ranks):
            time.sleep(2)  # the other one may say why, too
            end()
        time.sleep(0.05)
    return max(rank.returncode for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
