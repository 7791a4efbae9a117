// Compiled once for every kind of processor; PATH is the name of the result.
#include "layer.h"
#include "linear.h"

namespace {

void linear(const Linear& linear, const float* x, float* y, int64_t rows, const Team& team) {
    apply(linear, x, y, rows, nullptr, team);
}

void layer(const Layer& layer, const Pass& pass, const Team& team) { run(layer, pass, team); }

}  // namespace

#define QUOTED(name) #name
#define NAME(name) QUOTED(name)
#define JOINED(name) name##_path
#define SYMBOL(name) JOINED(name)

extern const Path SYMBOL(PATH) = {NAME(PATH), PANEL, linear, layer};
