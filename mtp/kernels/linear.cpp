// Products of rows and weight matrices, for CPUs: weights in panels, each row of sums in registers; mtp/kernels says what for.
//
// A panel holds the weights of kPanel outputs in the order in which they are read: those of the first input to all of
// them, of the second, and so on (of two inputs at a time in bfloat16).  Each thread has panels of its own, so that every
// weight comes from memory once, in one stream, however many rows there are.  A row's sums do not depend on what other
// rows there are: a product over many rows gives, to the last bit, what each would give alone.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();
constexpr int64_t kPanel = 2 * kLanes;
constexpr int kMostRows = kLanes >= 16 ? 8 : 4;  // two registers of sums each: half of those that there are

// ---- R rows `x [R, inputs]` with one panel: `out [R, kPanel]`, rows `outputs` apart -----------------------------------

template <int R>
void tile(const float* x, int64_t inputs, const float* panel, const float* bias, float* out, int64_t outputs) {
  Vec low[R], high[R];
  const Vec first = bias ? Vec::loadu(bias) : Vec(0), second = bias ? Vec::loadu(bias + kLanes) : Vec(0);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    low[r] = first;
    high[r] = second;
  }
  for (int64_t k = 0; k < inputs; k++, panel += kPanel) {
    const Vec one = Vec::loadu(panel), two = Vec::loadu(panel + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vec factor(x[r * inputs + k]);
      low[r] = at::vec::fmadd(factor, one, low[r]);
      high[r] = at::vec::fmadd(factor, two, high[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    low[r].store(out + r * outputs);
    high[r].store(out + r * outputs + kLanes);
  }
}

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
constexpr bool kHasBFloat16 = true;

template <int R>
void tile(const at::BFloat16* x, int64_t inputs, const at::BFloat16* panel, const at::BFloat16* bias,
          at::BFloat16* out, int64_t outputs) {
  __m512 low[R], high[R];
  Vec first(0), second(0);
  if (bias) {
    std::tie(first, second) =
        at::vec::convert_to_float<at::BFloat16>(at::vec::Vectorized<at::BFloat16>::loadu(bias));
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    low[r] = first;
    high[r] = second;
  }
  for (int64_t k = 0; k < inputs; k += 2, panel += 2 * kPanel) {
    const auto one = (__m512bh)_mm512_loadu_si512(panel), two = (__m512bh)_mm512_loadu_si512(panel + kPanel);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int pair;
      std::memcpy(&pair, x + r * inputs + k, sizeof(pair));
      const auto factors = (__m512bh)_mm512_set1_epi32(pair);
      low[r] = _mm512_dpbf16_ps(low[r], factors, one);
      high[r] = _mm512_dpbf16_ps(high[r], factors, two);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    _mm512_storeu_si512(out + r * outputs, (__m512i)_mm512_cvtne2ps_pbh(high[r], low[r]));
  }
}
#else
constexpr bool kHasBFloat16 = false;

template <int R>
void tile(const at::BFloat16*, int64_t, const at::BFloat16*, const at::BFloat16*, at::BFloat16*, int64_t) {}
#endif

template <typename T>
using Tile = void (*)(const T*, int64_t, const T*, const T*, T*, int64_t);

template <typename T, int... R>
constexpr std::array<Tile<T>, sizeof...(R)> tiles(std::integer_sequence<int, R...>) {
  return {static_cast<Tile<T>>(&tile<R + 1>)...};
}

template <typename T>
void multiply(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& bias, at::Tensor& out) {
  static constexpr auto of_rows = tiles<T>(std::make_integer_sequence<int, kMostRows>{});
  const int64_t outputs = panels.size(0), inputs = panels.size(1), rows = x.numel() / inputs;
  const T* from = x.const_data_ptr<T>();
  const T* weights = panels.const_data_ptr<T>();
  const T* added = bias ? bias->const_data_ptr<T>() : nullptr;
  T* to = out.mutable_data_ptr<T>();
  const int64_t count = outputs / kPanel, threads = at::get_num_threads();
  at::parallel_for(0, count, (count + threads - 1) / threads, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at++) {
      const T* panel = weights + at * kPanel * inputs;
      for (int64_t row = 0; row < rows; row += kMostRows) {
        of_rows[std::min<int64_t>(kMostRows, rows - row) - 1](
            from + row * inputs, inputs, panel, added ? added + at * kPanel : nullptr,
            to + row * outputs + at * kPanel, outputs);
      }
    }
  });
}

at::Tensor panel_linear(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& bias) {
  const auto dtype = panels.scalar_type();
  TORCH_CHECK((dtype == at::kFloat || (dtype == at::kBFloat16 && kHasBFloat16)) && x.scalar_type() == dtype &&
                  panels.dim() == 2 && panels.is_contiguous() && panels.size(0) % kPanel == 0 &&
                  panels.size(1) > 0 && panels.size(1) % 2 == 0 && x.dim() > 0 && x.size(-1) == panels.size(1) &&
                  (!bias || (bias->scalar_type() == dtype && bias->is_contiguous() && bias->numel() == panels.size(0))),
              "mtp::panel_linear: found rows ", x.sizes(), " of ", x.scalar_type(), " and panels ", panels.sizes(),
              " of ", dtype);
  auto sizes = x.sizes().vec();
  sizes.back() = panels.size(0);
  auto out = at::empty(sizes, x.options());
  if (dtype == at::kFloat) {
    multiply<float>(x.contiguous(), panels, bias, out);
  } else {
    multiply<at::BFloat16>(x.contiguous(), panels, bias, out);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(mtp, library) {
  library.def("panel_linear(Tensor x, Tensor panels, Tensor? bias) -> Tensor");
  library.def("panel_width() -> int", []() { return kPanel; });
  library.def("multiplies_bfloat16() -> bool", []() { return kHasBFloat16; });
}

TORCH_LIBRARY_IMPL(mtp, CPU, library) {
  library.impl("panel_linear", &panel_linear);
}
