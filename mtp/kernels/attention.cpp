// Attention of a few queries to many keys, for CPUs; mtp/kernels says what for.
//
// A thread takes up to eight queries that share keys and values at a time, so that each key and each value is read once
// for all of them, and their scores stay in its first cache.  Sums are in float32 whatever the tensors are.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();
constexpr int64_t kStep = 2 * kLanes;  // numbers of a head that are read at once: a whole vector of halves
constexpr int64_t kMostRows = 8;       // queries that a thread takes at a time: their sums fit into its registers

// `count` numbers, at most kStep, and zeros behind them.
template <typename T>
inline std::array<Vec, 2> read(const T* from, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    if (count >= kStep) return {Vec::loadu(from), Vec::loadu(from + kLanes)};
    if (count > kLanes) return {Vec::loadu(from), Vec::loadu(from + kLanes, count - kLanes)};
    return {Vec::loadu(from, count), Vec(0)};
  } else {
    using Halves = at::vec::Vectorized<T>;
    auto [low, high] = at::vec::convert_to_float<T>(count >= kStep ? Halves::loadu(from) : Halves::loadu(from, count));
    return {low, high};
  }
}

template <typename T>
inline void write(T* to, Vec low, Vec high, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    low.store(to, std::min(count, kLanes));
    if (count > kLanes) high.store(to + kLanes, std::min(count - kLanes, kLanes));
  } else {
    at::vec::convert_from_float<T>(low, high).store(to, std::min(count, kStep));
  }
}

inline float sum(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

struct Sizes {
  int64_t batch, kv_heads, groups, length, keys, dim, bias_rows;
};

template <typename T>
struct Rows {  // what belongs to one row of the batch and one head of keys and values
  const T *query, *key, *value, *bias;
  T* out;
  int64_t query_head, query_token, key_slot, value_slot, bias_row;
};

// `R` of the queries that share keys and values, from `first` on: query r stands for head r / length, token r % length.
template <typename T, int R>
void attend_rows(const Rows<T>& at, const Sizes& n, int64_t first, float scaling, std::vector<float>& scratch) {
  const int64_t dim = n.dim, keys = n.keys, padded = (dim + kStep - 1) / kStep * kStep;
  scratch.resize(R * (padded + keys));
  float* query = scratch.data();
  float* scores = query + R * padded;
  for (int r = 0; r < R; r++) {
    const T* from = at.query + (first + r) / n.length * at.query_head + (first + r) % n.length * at.query_token;
    for (int64_t d = 0; d < dim; d += kStep) {
      auto [low, high] = read(from + d, dim - d);
      (low * Vec(scaling)).store(query + r * padded + d);
      (high * Vec(scaling)).store(query + r * padded + d + kLanes);
    }
  }
  for (int64_t s = 0; s < keys; s++) {
    Vec dots[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) dots[r] = Vec(0);
    for (int64_t d = 0; d < dim; d += kStep) {
      auto [low, high] = read(at.key + s * at.key_slot + d, dim - d);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        dots[r] = at::vec::fmadd(Vec::loadu(query + r * padded + d), low, dots[r]);
        dots[r] = at::vec::fmadd(Vec::loadu(query + r * padded + d + kLanes), high, dots[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) scores[r * keys + s] = sum(dots[r]);
  }
  std::array<float, R> scale;
  for (int r = 0; r < R; r++) {
    float* row = scores + r * keys;
    const T* bias = at.bias + (first + r) % n.bias_rows * at.bias_row;
    Vec highest(-std::numeric_limits<float>::infinity());
    int64_t s = 0;
    for (; s + kStep <= keys; s += kStep) {
      auto [low, high] = read(bias + s, kStep);
      Vec one = Vec::loadu(row + s) + low, two = Vec::loadu(row + s + kLanes) + high;
      one.store(row + s);
      two.store(row + s + kLanes);
      highest = at::vec::maximum(highest, at::vec::maximum(one, two));
    }
    float most = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, highest);
    for (; s < keys; s++) most = std::max(most, row[s] += static_cast<float>(bias[s]));
    most = std::isinf(most) ? 0 : most;  // a query that sees nothing gets zeros
    Vec total(0);
    for (s = 0; s + kLanes <= keys; s += kLanes) {
      Vec x = (Vec::loadu(row + s) - Vec(most)).exp_u20();
      x.store(row + s);
      total = total + x;
    }
    float rest = sum(total);
    for (; s < keys; s++) rest += row[s] = std::exp(row[s] - most);
    scale[r] = rest > 0 ? 1 / rest : rest;
  }
  for (int64_t d = 0; d < dim; d += kStep) {
    Vec low[R], high[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) low[r] = high[r] = Vec(0);
    for (int64_t s = 0; s < keys; s++) {
      auto [one, two] = read(at.value + s * at.value_slot + d, dim - d);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        Vec weight(scores[r * keys + s]);
        low[r] = at::vec::fmadd(weight, one, low[r]);
        high[r] = at::vec::fmadd(weight, two, high[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const int64_t head = (first + r) / n.length, token = (first + r) % n.length;
      T* to = at.out + (token * n.kv_heads * n.groups + head) * dim;
      write(to + d, low[r] * Vec(scale[r]), high[r] * Vec(scale[r]), dim - d);
    }
  }
}

template <typename T>
void attend_all(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& bias,
                float scaling, at::Tensor& out) {
  const int64_t heads = query.size(1), kv_heads = key.size(1), width = out.size(1);
  const Sizes n{query.size(0), kv_heads,       heads / kv_heads, query.size(2),
                key.size(2),   query.size(3), bias.size(2)};
  const int64_t rows = n.groups * n.length, enough = 4 * at::get_num_threads();
  int64_t block = kMostRows;  // smaller where threads would be left without work
  while (block > 1 && n.batch * kv_heads * ((rows + block - 1) / block) < enough) block /= 2;
  const int64_t blocks = (rows + block - 1) / block;
  at::parallel_for(0, n.batch * kv_heads * blocks, 1, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> scratch;
    for (int64_t task = begin; task < end; task++) {
      const int64_t b = task / (kv_heads * blocks), h = task / blocks % kv_heads;
      const Rows<T> at{query.const_data_ptr<T>() + b * query.stride(0) + h * n.groups * query.stride(1),
                       key.const_data_ptr<T>() + b * key.stride(0) + h * key.stride(1),
                       value.const_data_ptr<T>() + b * value.stride(0) + h * value.stride(1),
                       bias.const_data_ptr<T>() + b * bias.stride(0),
                       out.mutable_data_ptr<T>() + (b * width * heads + h * n.groups) * n.dim,
                       query.stride(1),
                       query.stride(2),
                       key.stride(2),
                       value.stride(2),
                       bias.stride(2)};
      int64_t first = task % blocks * block;
      const int64_t last = std::min(first + block, rows);
      for (; first + 8 <= last; first += 8) attend_rows<T, 8>(at, n, first, scaling, scratch);
      for (; first + 4 <= last; first += 4) attend_rows<T, 4>(at, n, first, scaling, scratch);
      for (; first + 2 <= last; first += 2) attend_rows<T, 2>(at, n, first, scaling, scratch);
      for (; first < last; first += 1) attend_rows<T, 1>(at, n, first, scaling, scratch);
    }
  });
}

void attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& bias,
            double scaling, at::Tensor& out) {
  if (query.scalar_type() == at::kFloat) {
    attend_all<float>(query, key, value, bias, static_cast<float>(scaling), out);
  } else {
    attend_all<at::BFloat16>(query, key, value, bias, static_cast<float>(scaling), out);
  }
}

// Whether these are tensors of the kinds and layouts that are read here.
bool fits(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& bias) {
  const auto dtype = query.scalar_type();
  const int64_t dim = query.size(3);
  const auto is_readable = [&](const at::Tensor& x) {
    return x.dim() == 4 && x.scalar_type() == dtype && x.stride(3) == 1 && x.size(0) == query.size(0);
  };
  return (dtype == at::kFloat || dtype == at::kBFloat16) && key.size(3) == dim && value.size(3) == dim &&
         value.size(1) == key.size(1) && is_readable(query) && is_readable(key) && is_readable(value) &&
         is_readable(bias) &&
         bias.size(1) == 1 && key.size(1) > 0 && query.size(1) % key.size(1) == 0;
}

// ---- by itself ------------------------------------------------------------------------------------------------------

at::Tensor attend_few(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& bias,
                      double scaling) {
  TORCH_CHECK(fits(query, key, value, bias) && bias.size(3) == key.size(2) && value.size(2) == key.size(2) &&
                  (bias.size(2) == query.size(2) || bias.size(2) == query.size(1) / key.size(1) * query.size(2)),
              "mtp::attend_few: found query ", query.sizes(), ", key ", key.sizes(), ", value ", value.sizes(),
              " and bias ", bias.sizes(), " of ", query.scalar_type());
  auto out = at::empty({query.size(0), query.size(2), query.size(1), query.size(3)}, query.options());
  attend(query, key, value, bias, scaling, out);
  return out;
}

// ---- inside of a compiled layer -------------------------------------------------------------------------------------

// What the layer that is at work on this thread attends to: its buffers [B, heads, capacity, dim], and the bias
// [B, 1, T, S] over the S slots that hold something, the last T of which are this pass's.
struct Site {
  at::Tensor keys, values, bias;
};
thread_local std::optional<Site> expected;

void expect(const std::optional<at::Tensor>& keys, const std::optional<at::Tensor>& values,
            const std::optional<at::Tensor>& bias) {
  expected.reset();
  if (keys && values && bias) expected = Site{*keys, *values, *bias};
}

at::Tensor attend_cached(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         std::optional<double> scaling, std::optional<double> softcap,
                         const std::optional<at::Tensor>& sinks) {
  const auto site = std::exchange(expected, std::nullopt);
  const int64_t width = query.size(2);
  if (!site || !scaling || softcap || sinks || !fits(query, site->keys, site->values, site->bias) ||
      key.scalar_type() != query.scalar_type() || value.scalar_type() != query.scalar_type() ||
      site->bias.size(2) > width || site->bias.size(3) > site->keys.size(2)) {
    static const auto otherwise =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("mtp::attend", "")
            .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, std::optional<double>,
                              std::optional<double>, const std::optional<at::Tensor>&)>();
    return otherwise.call(query, key, value, scaling, softcap, sinks);
  }
  const int64_t length = site->bias.size(2), end = site->bias.size(3);
  site->keys.narrow(2, end - length, length).copy_(key.narrow(2, 0, length));
  site->values.narrow(2, end - length, length).copy_(value.narrow(2, 0, length));
  const std::array<int64_t, 4> sizes{query.size(0), width, query.size(1), query.size(3)};
  // Rows that fill the pass up are no tokens: nothing of them is kept, and nothing attended to.
  auto out = length < width ? at::zeros(sizes, query.options()) : at::empty(sizes, query.options());
  attend(query.narrow(2, 0, length), site->keys.narrow(2, 0, end), site->values.narrow(2, 0, end), site->bias,
         *scaling, out);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(mtp, library) {
  library.def("attend_few(Tensor query, Tensor key, Tensor value, Tensor bias, float scaling) -> Tensor");
  library.def("expect(Tensor? keys, Tensor? values, Tensor? bias) -> ()", &expect);
  library.def(
      "attend_cached(Tensor query, Tensor key, Tensor value, float? scaling, float? softcap, Tensor? sinks) -> Tensor");
}

TORCH_LIBRARY_IMPL(mtp, CPU, library) {
  library.impl("attend_few", &attend_few);
  library.impl("attend_cached", &attend_cached);
}
