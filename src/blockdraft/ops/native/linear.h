// Products of a few rows with a large weight.
//
// An output is one accumulator that runs over the inputs in order.  How rows are put together into tiles, and inputs
// into steps, decides what is in the cache when it is needed, and never what is added to what.
#pragma once

#include "kernel.h"
#include "vector.h"

namespace {

constexpr int64_t PANEL = 3 * LANES;
constexpr int64_t TILE = LANES / 2;     // rows whose accumulators, of 3 registers each, leave room for the weights
constexpr int64_t BLOCK = 64;           // rows that share one reading of the weights
constexpr int64_t STEP = 4608 / PANEL;  // inputs after which the next tile of a block has its turn: 18 KiB of a panel
constexpr int64_t AHEAD = 4096;         // bytes; how far ahead a single tile asks for weights

// sums [R, PANEL] += x [R, depth] times one panel's part, asking memory for `stride` bytes of `next` at every input.
template <int R, class Weight>
inline void tile(
    const float* x, int64_t inputs, const Weight* weight, int64_t depth, float* sums, const char* next, int64_t stride
) {
    wide a[R][3];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 3; j++) a[r][j] = load<wide>(sums + r * PANEL + LANES * j);
    for (int64_t k = 0; k < depth; k++) {
        wide w0 = load_wide(weight), w1 = load_wide(weight + LANES), w2 = load_wide(weight + 2 * LANES);
        weight += PANEL;
        __builtin_prefetch(next);
        next += stride;
        for (int r = 0; r < R; r++) {
            wide value = all<wide>(x[r * inputs + k]);
            a[r][0] = multiply_add(value, w0, a[r][0]);
            a[r][1] = multiply_add(value, w1, a[r][1]);
            a[r][2] = multiply_add(value, w2, a[r][2]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 3; j++) store(sums + r * PANEL + LANES * j, a[r][j]);
}

// Of as many rows as there are; `rows` is at most R.
template <int R, class Weight>
inline void any_tile(
    int64_t rows, const float* x, int64_t inputs, const Weight* w, int64_t depth, float* sums, const char* next,
    int64_t stride
) {
    if constexpr (R > 1)
        if (rows < R) return any_tile<R - 1>(rows, x, inputs, w, depth, sums, next, stride);
    tile<R>(x, inputs, w, depth, sums, next, stride);
}

// One panel for at most BLOCK rows, into sums [rows, PANEL].
template <class Weight>
inline void panel(const float* x, int64_t rows, int64_t inputs, const Weight* weight, float* sums) {
    memset(sums, 0, sizeof(float) * rows * PANEL);
    int64_t tiles = (rows + TILE - 1) / TILE;
    int64_t step = tiles == 1 ? inputs : STEP;
    for (int64_t first = 0; first < inputs; first += step) {
        int64_t depth = inputs - first < step ? inputs - first : step;
        const Weight* part = weight + first * PANEL;
        // Tiles after the first find their weights in the cache; so that memory does not rest meanwhile, each of them
        // asks for its share of the next step, which lies right behind, also where it belongs to the next panel.
        const char* next = reinterpret_cast<const char*>(part + depth * PANEL);
        int64_t stride = (PANEL * sizeof(Weight) + tiles - 1) / tiles;
        if (tiles == 1) {
            next = reinterpret_cast<const char*>(part) + AHEAD;
            any_tile<TILE>(rows, x, inputs, part, depth, sums, next, stride);
            return;
        }
        for (int64_t t = 0; t < tiles; t++) {
            int64_t r = rows * t / tiles, count = rows * (t + 1) / tiles - r;
            any_tile<TILE>(count, x + r * inputs + first, inputs, part, depth, sums + r * PANEL, next, stride);
            next += depth * stride;
        }
    }
}

template <class Weight>
inline void product(const Linear& linear, const float* x, float* y, int64_t rows, const float* added, const Team& team) {
    const Weight* weights = static_cast<const Weight*>(linear.panels);
    int64_t panels = (linear.outputs + PANEL - 1) / PANEL, inputs = linear.inputs;
    alignas(64) float sums[BLOCK * PANEL];
    for (int64_t block = 0; block < rows; block += BLOCK) {
        int64_t count = rows - block < BLOCK ? rows - block : BLOCK;
        for (int64_t p = team.from(panels); p < team.to(panels); p++) {
            panel(x + block * inputs, count, inputs, weights + p * inputs * PANEL, sums);
            int64_t column = p * PANEL;
            int64_t columns = linear.outputs - column < PANEL ? linear.outputs - column : PANEL;
            for (int64_t r = 0; r < count; r++) {
                int64_t at = (block + r) * linear.outputs + column;
                for (int64_t c = 0; c < columns; c++) {
                    float value = sums[r * PANEL + c];
                    if (linear.bias) value += linear.bias[column + c];
                    y[at + c] = added ? added[at + c] + value : value;
                }
            }
        }
    }
}

// This thread's outputs of y = added + linear(x); `added` may be y itself, or null.
inline void apply(const Linear& linear, const float* x, float* y, int64_t rows, const float* added, const Team& team) {
    if (linear.is_half)
        product<half>(linear, x, y, rows, added, team);
    else
        product<float>(linear, x, y, rows, added, team);
}

}  // namespace
