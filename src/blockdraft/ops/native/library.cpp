// What Python calls: which paths there are, which threads, and the calls themselves.
#include <cstring>

#include "kernel.h"

namespace {

// The functions of the OpenMP library that torch itself runs on: a second one would fight it for the processor.
void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
void (*barrier)() = nullptr;
int (*thread_number)() = nullptr;
int (*thread_count)() = nullptr;

constexpr int64_t SMALL = 1 << 15;  // weights read; less is done sooner than a second thread has woken up

template <class Work>
void together(int threads, Work work) {
    if (threads < 2 || !parallel) return work(Team{0, 1, nullptr});
    auto member = [](void* data) {
        (*static_cast<Work*>(data))(Team{thread_number(), thread_count(), barrier});
    };
    parallel(member, &work, threads, 0);
}

bool is_named(const char* name, const Path& path) { return !name || strcmp(name, path.name) == 0; }

}  // namespace

extern "C" {

// What the library was made from.
const char* kernel_sources() { return SOURCES; }

// The path of that name or, for null, the fastest that this processor has; null: it does not have that one.
const Path* kernel_path(const char* name) {
    const Path* found = is_named(name, portable_path) ? &portable_path : nullptr;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
    if (avx2 && is_named(name, avx2_path)) found = &avx2_path;
    if (avx512 && is_named(name, avx512_path)) found = &avx512_path;
#endif
    return found;
}

const char* kernel_path_name(const Path* path) { return path->name; }

int64_t kernel_path_panel(const Path* path) { return path->panel; }

void kernel_threads(void* run, void* wait, void* number, void* count) {
    parallel = reinterpret_cast<decltype(parallel)>(run);
    barrier = reinterpret_cast<decltype(barrier)>(wait);
    thread_number = reinterpret_cast<decltype(thread_number)>(number);
    thread_count = reinterpret_cast<decltype(thread_count)>(count);
}

void kernel_linear(const Path* path, const Linear* linear, const float* x, float* y, int64_t rows, int threads) {
    if (linear->outputs * linear->inputs < SMALL) threads = 1;
    together(threads, [=](const Team& team) { path->linear(*linear, x, y, rows, team); });
}

// How many floats of scratch a pass through the layer takes.
int64_t kernel_scratch(const Layer* layer, int64_t rows, int64_t longest, int threads) {
    int64_t heads = 2 * layer->heads + 2 * layer->groups;
    return rows * (heads * layer->head_width + layer->hidden + 3 * layer->inner) + threads * HEADS * scores_room(longest);
}

void kernel_layer(const Path* path, const Layer* layer, const Pass* pass, int threads) {
    if (layer->gate_up.outputs * layer->gate_up.inputs < SMALL) threads = 1;
    together(threads, [=](const Team& team) { path->layer(*layer, *pass, team); });
}
}
