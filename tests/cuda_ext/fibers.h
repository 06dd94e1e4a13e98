// One CTA at a time on one processor: every CUDA thread is a fiber with a stack of its own, which runs until it has to wait for
// others. Threads that do not meet where they must, or never, end the launch with a message.
#pragma once

#include <sys/mman.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <source_location>
#include <vector>

#if !defined(__x86_64__) || defined(KVBOOST_EDGE_UCONTEXT)
#include <ucontext.h>
#endif

struct Index3 {
    unsigned x, y, z;
};
inline Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

using Site = std::source_location;

constexpr int kMostThreads = 1024;
constexpr size_t kStackBytes = 128 * 1024;

// Which waiting fiber runs next. A race between threads shows as a result that depends on it, or as poison.
enum Order : int { kForward = 0, kBackward = 1, kShuffled = 2 };
// When an asynchronous copy, or a read or write of a whole warp, happens: as early or as late as the hardware may.
enum Timing : int { kEarly = 0, kLate = 1 };

inline bool is_same(Site one, Site two) {
    return one.line() == two.line() && (one.file_name() == two.file_name() || strcmp(one.file_name(), two.file_name()) == 0);
}

struct Copy {
    void *target;
    const void *source;
};

#if defined(__x86_64__) && !defined(KVBOOST_EDGE_UCONTEXT)
// Saves the registers that a called function must keep, and the stack pointer; goes on where `to` was saved.
extern "C" void kvboost_edge_switch(void **from, void *to) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden kvboost_edge_switch
.globl kvboost_edge_switch
kvboost_edge_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

struct Context {
    void *stack_pointer = nullptr;
    void start(std::byte *stack, void (*entry)()) {
        auto **top = reinterpret_cast<void **>(stack + kStackBytes);
        top[-1] = nullptr;
        top[-2] = reinterpret_cast<void *>(entry);
        stack_pointer = top - 8;  // six registers below
    }
    void switch_to(Context &to) { kvboost_edge_switch(&stack_pointer, to.stack_pointer); }
};
#else
struct Context {
    ucontext_t context;
    void start(std::byte *stack, void (*entry)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = kStackBytes;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
    }
    void switch_to(Context &to) { swapcontext(&context, &to.context); }
};
#endif

struct Fiber {
    Context context;
    std::vector<Copy> copies;  // not yet done
};

struct Warp {
    uint32_t ready = 0;
    int arrived = 0;
    Site site;  // where the first of those arrived
    alignas(64) unsigned char in[32][128];
    alignas(64) unsigned char out[32][64];
};

struct Machine {
    Fiber fibers[kMostThreads];
    Warp warps[kMostThreads / 32];
    Context launcher;
    std::byte *stacks = nullptr;
    int num_threads = 0, num_finished = 0, current = 0;
    int at_barrier = 0;
    Site barrier;
    Order order = kForward;
    Timing timing = kEarly;
    uint32_t random = 1;
    unsigned char *arena = nullptr;
    size_t arena_bytes = 0;
    void (*body)(const void *) = nullptr;
    const void *argument = nullptr;
    char message[512] = "";
};
inline Machine machine;

[[noreturn]] inline void leave() {
    machine.fibers[machine.current].context.switch_to(machine.launcher);
    abort();  // nobody comes back
}

// Ends the launch: the fibers stay where they are and are started afresh by the next one.
[[noreturn]] inline void fail(Site site, const char *format, ...) {
    int length = snprintf(machine.message, sizeof machine.message, "%s:%u: block (%u, %u, %u), thread %d: ", site.file_name(), site.line(),
                          blockIdx.x, blockIdx.y, blockIdx.z, machine.current);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(machine.message + length, sizeof machine.message - length, format, arguments);
    va_end(arguments);
    leave();
}

inline uint32_t next_random() {
    machine.random ^= machine.random << 13;
    machine.random ^= machine.random >> 17;
    return machine.random ^= machine.random << 5;
}

inline int pick_lane(uint32_t ready) {
    if (machine.order == kForward) return __builtin_ctz(ready);
    if (machine.order == kBackward) return 31 - __builtin_clz(ready);
    for (int skip = next_random() % __builtin_popcount(ready); skip > 0; --skip) ready &= ready - 1;
    return __builtin_ctz(ready);
}

// The thread that goes on; -1 if all wait. Forward and backward a warp runs as far as it gets, shuffled they take turns.
inline int pick_thread() {
    const int num_warps = machine.num_threads / 32;
    const int start = machine.order == kShuffled ? next_random() % num_warps : machine.current / 32;
    for (int i = 0; i < num_warps; ++i) {
        const int warp = (start + (machine.order == kBackward ? num_warps - i : i)) % num_warps;
        if (machine.warps[warp].ready) return warp * 32 + pick_lane(machine.warps[warp].ready);
    }
    return -1;
}

inline void give_way(Site site) {
    const int next = pick_thread(), own = machine.current;
    if (next == own) return;
    if (next < 0) {
        if (machine.num_finished == machine.num_threads) leave();
        fail(site, "deadlock: %d of %d threads have returned, %d wait at __syncthreads, the others in their warps", machine.num_finished,
             machine.num_threads, machine.at_barrier);
    }
    machine.current = next;
    threadIdx.x = next;
    machine.fibers[own].context.switch_to(machine.fibers[next].context);
}

inline void block_barrier(Site site) {
    if (machine.at_barrier == 0) machine.barrier = site;
    if (!is_same(site, machine.barrier)) fail(site, "divergent barrier: another thread waits at line %u", machine.barrier.line());
    machine.warps[machine.current / 32].ready &= ~(1u << machine.current % 32);
    if (++machine.at_barrier == machine.num_threads) {
        machine.at_barrier = 0;
        for (int i = 0; i < machine.num_threads / 32; ++i) machine.warps[i].ready = ~0u;
    }
    give_way(site);
}

// All 32 threads of a warp come here with an `In`; the last one turns them into 32 `Out`s. A warp's threads must come from one
// place in the source.
template <class Out, class In, class Compute>
Out meet(Site site, const In &in, Compute compute) {
    static_assert(sizeof(In) <= sizeof(Warp::in[0]) && sizeof(Out) <= sizeof(Warp::out[0]));
    Warp &warp = machine.warps[machine.current / 32];
    const int lane = machine.current % 32;
    if (warp.arrived == 0) warp.site = site;
    if (!is_same(site, warp.site)) fail(site, "divergent warp: another of its threads waits at line %u", warp.site.line());
    memcpy(warp.in[lane], &in, sizeof in);
    warp.ready &= ~(1u << lane);
    if (++warp.arrived == 32) {
        In ins[32];
        Out outs[32];
        for (int i = 0; i < 32; ++i) memcpy(&ins[i], warp.in[i], sizeof(In));
        compute(ins, outs);
        for (int i = 0; i < 32; ++i) memcpy(warp.out[i], &outs[i], sizeof(Out));
        warp.arrived = 0;
        warp.ready = ~0u;
    }
    give_way(site);
    Out out;
    memcpy(&out, warp.out[lane], sizeof out);
    return out;
}

inline void do_copies() {
    for (const Copy &copy : machine.fibers[machine.current].copies) {
        if (copy.source)
            memcpy(copy.target, copy.source, 16);
        else
            memset(copy.target, 0, 16);
    }
    machine.fibers[machine.current].copies.clear();
}

inline void run_fiber() {
    machine.body(machine.argument);
    if (!machine.fibers[machine.current].copies.empty()) fail(Site::current(), "returns with asynchronous copies that nobody waited for");
    machine.warps[machine.current / 32].ready &= ~(1u << machine.current % 32);
    ++machine.num_finished;
    give_way(Site::current());
    abort();
}

// False, with machine.message, if the CTA did not come to its end.
inline bool run_block(int num_threads) {
    if (!machine.stacks)
        machine.stacks = static_cast<std::byte *>(
            mmap(nullptr, kMostThreads * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    machine.num_threads = num_threads;
    machine.num_finished = machine.at_barrier = 0;
    for (int i = 0; i < num_threads; ++i) {
        machine.fibers[i].copies.clear();
        machine.fibers[i].context.start(machine.stacks + i * kStackBytes, run_fiber);
    }
    for (int i = 0; i < num_threads / 32; ++i) {
        machine.warps[i].ready = ~0u;
        machine.warps[i].arrived = 0;
    }
    memset(machine.arena, 0xff, machine.arena_bytes);  // NaN as f16, bf16 and f32
    machine.current = machine.order == kBackward ? num_threads - 1 : 0;
    threadIdx = {static_cast<unsigned>(machine.current), 0, 0};
    machine.launcher.switch_to(machine.fibers[machine.current].context);
    return machine.message[0] == 0;
}

// Runs a grid; nullptr, or what went wrong. `num_threads` is a multiple of 32.
template <class Params>
const char *launch(void (*kernel)(Params), Index3 grid, int num_threads, size_t shared_bytes, const Params &params, int order, int timing) {
    struct Call {
        void (*kernel)(Params);
        const Params *params;
    } call = {kernel, &params};
    machine.message[0] = 0;
    machine.order = static_cast<Order>(order);
    machine.timing = static_cast<Timing>(timing);
    machine.random = 2463534242u;
    machine.body = [](const void *c) { static_cast<const Call *>(c)->kernel(*static_cast<const Call *>(c)->params); };
    machine.argument = &call;
    machine.arena_bytes = shared_bytes;
    machine.arena = static_cast<unsigned char *>(aligned_alloc(128, (shared_bytes + 127) / 128 * 128));
    blockDim = {static_cast<unsigned>(num_threads), 1, 1};
    gridDim = grid;
    const unsigned num_blocks = grid.x * grid.y * grid.z;
    bool is_done = true;
    for (unsigned i = 0; i < num_blocks && is_done; ++i) {
        const unsigned block = order == kBackward ? num_blocks - 1 - i : i;
        blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
        is_done = run_block(num_threads);
    }
    free(machine.arena);
    return is_done ? nullptr : machine.message;
}

}  // namespace on_cpu
