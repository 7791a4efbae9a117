// What Python calls: which path, which threads, and the calls themselves.
#include "kernel.h"

namespace {

// The functions of the OpenMP library that torch itself runs on: a second one would fight it for the processor.
void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
void (*barrier)() = nullptr;
int (*thread_number)() = nullptr;
int (*thread_count)() = nullptr;

const Path* path = &portable_path;

constexpr int64_t SMALL = 1 << 15;  // weights read; less is done sooner than a second thread has woken up

template <class Work>
void together(int threads, Work work) {
    if (threads < 2 || !parallel) return work(Team{0, 1, nullptr});
    auto member = [](void* data) {
        (*static_cast<Work*>(data))(Team{thread_number(), thread_count(), barrier});
    };
    parallel(member, &work, threads, 0);
}

bool has_avx2() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

}  // namespace

extern "C" {

// What the library was made from.
const char* kernel_sources() { return SOURCES; }

// The name of the path taken from now on: the fastest that this processor has, or the portable one.
const char* kernel_choose(int portable) {
    path = &portable_path;
#if defined(__x86_64__)
    if (!portable && has_avx2()) path = &avx2_path;
#endif
    return path->name;
}

void kernel_threads(void* run, void* wait, void* number, void* count) {
    parallel = reinterpret_cast<decltype(parallel)>(run);
    barrier = reinterpret_cast<decltype(barrier)>(wait);
    thread_number = reinterpret_cast<decltype(thread_number)>(number);
    thread_count = reinterpret_cast<decltype(thread_count)>(count);
}

void kernel_linear(const Linear* linear, const float* x, float* y, int64_t rows, int threads) {
    if (linear->outputs * linear->inputs < SMALL) threads = 1;
    together(threads, [=](const Team& team) { path->linear(*linear, x, y, rows, team); });
}

// How many floats of scratch a pass through the layer takes.
int64_t kernel_scratch(const Layer* layer, int64_t rows, int64_t longest, int threads) {
    int64_t heads = 2 * layer->heads + 2 * layer->groups;
    return rows * (heads * layer->head_width + layer->hidden + 3 * layer->inner) + threads * (longest + 32);
}

void kernel_layer(const Layer* layer, const Pass* pass, int threads) {
    if (layer->gate_up.outputs * layer->gate_up.inputs < SMALL) threads = 1;
    together(threads, [=](const Team& team) { path->layer(*layer, *pass, team); });
}
}
