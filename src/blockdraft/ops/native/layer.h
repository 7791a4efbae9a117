// A decoder layer of the Llama family in one go: no step waits for anything but the step before it.
//
// What a row becomes depends on its own numbers and position: sums run in an order that follows from these alone.
#pragma once

#include "linear.h"

namespace {

constexpr int64_t EIGHT = 8;

inline int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// y = x / root mean square of x * weight, over `width` numbers.
inline void normed(const float* x, const float* weight, float eps, int64_t width, float* y) {
    v8 squares = all(0.0f);
    for (int64_t i = 0; i < width; i += EIGHT) squares = multiply_add(load(x + i), load(x + i), squares);
    v8 scale = all(1.0f / __builtin_sqrtf(sum(squares) / (float)width + eps));
    for (int64_t i = 0; i < width; i += EIGHT) store(y + i, load(x + i) * scale * load(weight + i));
}

inline void normed_rows(const float* x, const float* weight, float eps, int64_t rows, int64_t width, float* y,
                        const Team& team) {
    for (int64_t r = team.from(rows); r < team.to(rows); r++) normed(x + r * width, weight, eps, width, y + r * width);
}

// Rotary embedding of one head in place: pairs are a half of the head apart.
inline void rotate(float* x, const float* cosines, const float* sines, int64_t width) {
    for (int64_t i = 0; i < width / 2; i++) {
        int64_t j = i + width / 2;
        float first = x[i], second = x[j];
        x[i] = first * cosines[i] - second * sines[i];
        x[j] = second * cosines[j] + first * sines[j];
    }
}

// Queries and keys of this thread's heads are normed and turned; keys and values go to their places in the cache.
inline void turned(const Layer& layer, const Pass& pass, float* qkv, const Team& team) {
    int64_t width = layer.head_width, parts = layer.heads + 2 * layer.groups, rows = pass.batch * pass.width;
    for (int64_t item = team.from(rows * parts); item < team.to(rows * parts); item++) {
        int64_t row = item / parts, part = item % parts, group = (part - layer.heads) % layer.groups;
        float* x = qkv + item * width;
        if (part < layer.heads + layer.groups) {
            if (layer.head_norms) normed(x, layer.head_norms + part * width, layer.eps, width, x);
            rotate(x, pass.cosines + row * width, pass.sines + row * width, width);
        }
        if (part >= layer.heads) {
            int64_t b = row / pass.width, at = pass.starts[b] + row % pass.width;
            float* memory = part < layer.heads + layer.groups ? pass.keys : pass.values;
            memcpy(memory + ((pass.slots[b] * layer.groups + group) * pass.room + at) * width, x, sizeof(float) * width);
        }
    }
}

// Products of H queries with `count` keys, four at a time; a last four that is not full repeats its last key.
template <int H>
inline void scored(
    const float* queries, const float* keys, int64_t count, int64_t width, float scale, float* scores, int64_t room
) {
    for (int64_t s = 0; s < count; s += 4) {
        const float* each[4];
        for (int64_t i = 0; i < 4; i++) each[i] = keys + (s + i < count ? s + i : count - 1) * width;
        v8 a[H][4];
        for (int h = 0; h < H; h++)
            for (int i = 0; i < 4; i++) a[h][i] = all(0.0f);
        for (int64_t e = 0; e < width; e += EIGHT)
            for (int i = 0; i < 4; i++) {
                v8 key = load(each[i] + e);
                for (int h = 0; h < H; h++) a[h][i] = multiply_add(load(queries + h * width + e), key, a[h][i]);
            }
        for (int h = 0; h < H; h++) {
            float* own = scores + h * room + s;
            sum_four(a[h][0], a[h][1], a[h][2], a[h][3], own);
            for (int64_t i = 0; i < 4; i++) own[i] *= scale;
        }
    }
}

// Scores become what each value counts; the number that they sum up to is returned.
inline float weighted(float* scores, int64_t count) {
    int64_t end = round_up(count, EIGHT);
    for (int64_t s = count; s < end; s++) scores[s] = scores[0];
    v8 highest = load(scores);
    for (int64_t s = EIGHT; s < end; s += EIGHT) highest = load(scores + s) > highest ? load(scores + s) : highest;
    float largest = highest[0];
    for (int64_t i = 1; i < EIGHT; i++) largest = highest[i] > largest ? highest[i] : largest;
    v8 total = all(0.0f);
    for (int64_t s = 0; s < end; s += EIGHT) {
        store(scores + s, exponential(load(scores + s) - all(largest)));
        if (s + EIGHT > count)
            for (int64_t i = count; i < end; i++) scores[i] = 0.0f;
        total += load(scores + s);
    }
    return sum(total);
}

// N vectors of `count` values, weighted in H ways, in the order of their positions.
template <int H, int N, class Vector>
inline void mixed(
    const float* weights, int64_t room, const float* values, int64_t count, int64_t width, const float* shares, float* y
) {
    constexpr int64_t lanes = sizeof(Vector) / sizeof(float);
    Vector a[H][N];
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) a[h][i] = all<Vector>(0.0f);
    for (int64_t s = 0; s < count; s++)
        for (int i = 0; i < N; i++) {
            Vector value = load<Vector>(values + s * width + lanes * i);
            for (int h = 0; h < H; h++) a[h][i] = multiply_add(all<Vector>(weights[h * room + s]), value, a[h][i]);
        }
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) store(y + h * width + lanes * i, a[h][i] * all<Vector>(shares[h]));
}

// Attention of one position of H heads, which see the same keys and values, into y [H, E].
template <int H>
inline void attend(
    const float* queries, const float* keys, const float* values, int64_t count, int64_t width, float* scores,
    int64_t room, float* y
) {
    scored<H>(queries, keys, count, width, 1.0f / __builtin_sqrtf((float)width), scores, room);
    float shares[H];
    for (int h = 0; h < H; h++) shares[h] = 1.0f / weighted(scores + h * room, count);
    int64_t e = 0;
    for (; e + 4 * LANES <= width; e += 4 * LANES)
        mixed<H, 4, wide>(scores, room, values + e, count, width, shares, y + e);
    for (; e < width; e += EIGHT) mixed<H, 1, v8>(scores, room, values + e, count, width, shares, y + e);
}

// Attention of this thread's queries over the cache, into mix [R, H * E]: of up to HEADS heads of a group at a time.
inline void attended(const Layer& layer, const Pass& pass, const float* qkv, float* mix, float* scores,
                     const Team& team) {
    int64_t width = layer.head_width, parts = layer.heads + 2 * layer.groups, shared = layer.heads / layer.groups;
    int64_t bunches = (shared + HEADS - 1) / HEADS, room = scores_room(pass.longest);
    int64_t items = pass.batch * layer.groups * bunches * pass.width;
    for (int64_t item = team.from(items); item < team.to(items); item++) {
        int64_t q = item % pass.width, bunch = item / pass.width % bunches;
        int64_t group = item / pass.width / bunches % layer.groups, b = item / pass.width / bunches / layer.groups;
        int64_t head = group * shared + shared * bunch / bunches;
        int64_t heads = group * shared + shared * (bunch + 1) / bunches - head;
        int64_t row = b * pass.width + q, own = pass.starts[b] + q + 1;
        int64_t end = layer.causal ? own : pass.starts[b] + pass.width;
        int64_t first = layer.window && own - layer.window > layer.blind ? own - layer.window : layer.blind;
        int64_t at = ((pass.slots[b] * layer.groups + group) * pass.room + first) * width, count = end - first;
        const float *queries = qkv + (row * parts + head) * width, *keys = pass.keys + at, *values = pass.values + at;
        float* y = mix + (row * layer.heads + head) * width;
        switch (heads) {
            case 1: attend<1>(queries, keys, values, count, width, scores, room, y); break;
            case 2: attend<2>(queries, keys, values, count, width, scores, room, y); break;
            default: attend<3>(queries, keys, values, count, width, scores, room, y);
        }
    }
}

// y = silu(gate) * up for this thread's part of gate_up [R, 2 * I].
inline void gated(const float* gate_up, int64_t rows, int64_t inner, float* y, const Team& team) {
    int64_t vectors = inner / EIGHT;
    for (int64_t item = team.from(rows * vectors); item < team.to(rows * vectors); item++) {
        const float* gate = gate_up + (item / vectors * 2 * inner) + item % vectors * EIGHT;
        v8 x = load(gate);
        store(y + item * EIGHT, x / (all(1.0f) + exponential(-x)) * load(gate + inner));
    }
}

inline void run(const Layer& layer, const Pass& pass, const Team& team) {
    int64_t rows = pass.batch * pass.width, width = layer.head_width;
    float* qkv = pass.scratch;
    float* mix = qkv + rows * (layer.heads + 2 * layer.groups) * width;
    float* normal = mix + rows * layer.heads * width;
    float* gate_up = normal + rows * layer.hidden;
    float* active = gate_up + rows * 2 * layer.inner;
    float* scores = active + rows * layer.inner + team.thread * HEADS * scores_room(pass.longest);
    normed_rows(pass.x, layer.input_norm, layer.eps, rows, layer.hidden, normal, team);
    team.wait();
    apply(layer.qkv, normal, qkv, rows, nullptr, team);
    team.wait();
    turned(layer, pass, qkv, team);
    team.wait();
    attended(layer, pass, qkv, mix, scores, team);
    team.wait();
    apply(layer.out, mix, pass.y, rows, pass.x, team);
    team.wait();
    normed_rows(pass.y, layer.post_norm, layer.eps, rows, layer.hidden, normal, team);
    team.wait();
    apply(layer.gate_up, normal, gate_up, rows, nullptr, team);
    team.wait();
    gated(gate_up, rows, layer.inner, active, team);
    team.wait();
    apply(layer.down, active, pass.y, rows, pass.y, team);
}

}  // namespace
