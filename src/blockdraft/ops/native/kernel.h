// What the library computes, in the terms that both sides of it share.
//
// Letters: R rows, Q tokens of one sequence, D hidden width, H/G query/key-value heads, E head width, I inner width.
#pragma once

#include <cstdint>

extern "C" {

// y [R, out] = x [R, in] @ weight.T + bias.  The weight lies in panels of some outputs, each [in, outputs], the last one
// filled up with zeros; how many says the path.
struct Linear {
    const void* panels;
    const float* bias;  // none: null
    int64_t outputs, inputs, is_half;
};

// A decoder layer of the Llama family, or one of a drafter, whose Q tokens may all see one another.
struct Layer {
    Linear qkv, out, gate_up, down;
    const float *input_norm, *post_norm;
    const float* head_norms;  // [H + G, E]; none: null
    int64_t hidden, heads, groups, head_width, inner;
    int64_t window;  // how far back it sees; 0: everything
    int64_t blind;   // positions at the beginning that nobody sees
    int64_t causal;  // 0: each of the Q tokens sees all of them
    float eps;
};

// One pass through a layer: B sequences of Q tokens each.
struct Pass {
    const float* x;  // [B * Q, D]
    float* y;        // [B * Q, D]
    const float *cosines, *sines;  // [B * Q, E]
    float *keys, *values;  // [slots, G, room, E]
    const int64_t *slots, *starts;  // [B]
    int64_t batch, width, room, longest;
    float* scratch;  // as much as `layer_scratch` says, for this number of threads
};
}

// Heads of a group whose attention is computed together: four keys of each are as many sums as registers hold.
constexpr int64_t HEADS = 3;

// Floats for the scores of one head over the longest context, and what is computed besides.  Static: of a function
// compiled for several processors, the linker would keep any one.
static inline int64_t scores_room(int64_t longest) { return (longest + 23) / 16 * 16; }

// One thread of several that compute the same thing together.
struct Team {
    int thread, threads;
    void (*barrier)();

    // Always inlined, for the same reason.
    __attribute__((always_inline)) void wait() const {
        if (threads > 1) barrier();
    }

    // This thread's part of `count` things.
    __attribute__((always_inline)) int64_t from(int64_t count) const { return count * thread / threads; }
    __attribute__((always_inline)) int64_t to(int64_t count) const { return count * (thread + 1) / threads; }
};

// The same functions, compiled for one kind of processor.
struct Path {
    const char* name;
    int64_t panel;  // outputs of a panel
    void (*linear)(const Linear&, const float* x, float* y, int64_t rows, const Team&);
    void (*layer)(const Layer&, const Pass&, const Team&);
};

extern const Path portable_path, avx2_path, avx512_path;
