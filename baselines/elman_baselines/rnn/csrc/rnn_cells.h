// LSTM and GRU as in torch.nn and cuDNN, sLSTM as in its paper. Gates of an LSTM in the order i f g o, of a GRU r z n, of an sLSTM i f z o.
#pragma once

#include <elman/gates_cell.h>

namespace elman::rnn {

// s = f s' + i g, h = o tanh(s). Kept: the four pre-activations.
struct Lstm {
  static constexpr int gates = 4, kept = 4;
  static constexpr bool memory = true, splits = false, staged = false;

  template <class Math, class T>
  static ELMAN_HD GatesState<T> forward(const T* p, const T* u, T, T s, T* kept) {
    for (int q = 0; q < 4; ++q) kept[q] = p[q] + u[q];
    const T next = Math::gate(kept[1]).open * s + Math::gate(kept[0]).open * Math::tanh(kept[2]);
    return {Math::gate(kept[3]).open * Math::tanh(next), next};
  }
  template <class Math, class T>
  static ELMAN_HD GatesGrad<T, 4> backward(T gh, T gs, const T* kept, T, T s, T s_new) {
    const Gate<T> i = Math::gate(kept[0]), f = Math::gate(kept[1]), o = Math::gate(kept[3]);
    const T g = Math::tanh(kept[2]), read = Math::tanh(s_new), total = gs + gh * o.open * (T(1) - read * read);
    return {
        {total * g * i.open * i.shut, total * s * f.open * f.shut, total * i.open * (T(1) - g * g), gh * read * o.open * o.shut},
        {},
        T(0),
        total * f.open};
  }
};

// n = tanh(u_n + r p_n), h = (1 - z) n + z h'. Kept: the pre-activations of r, z and n, and p_n.
struct Gru {
  static constexpr int gates = 3, kept = 4;
  static constexpr bool memory = false, splits = true, staged = false;

  template <class Math, class T>
  static ELMAN_HD GatesState<T> forward(const T* p, const T* u, T h, T, T* kept) {
    kept[0] = p[0] + u[0], kept[1] = p[1] + u[1], kept[3] = p[2];
    kept[2] = u[2] + Math::gate(kept[0]).open * p[2];
    const Gate<T> z = Math::gate(kept[1]);
    return {z.shut * Math::tanh(kept[2]) + z.open * h, T(0)};
  }
  template <class Math, class T>
  static ELMAN_HD GatesGrad<T, 3> backward(T gh, T, const T* kept, T h, T, T) {
    const Gate<T> r = Math::gate(kept[0]), z = Math::gate(kept[1]);
    const T n = Math::tanh(kept[2]), dn = gh * z.shut * (T(1) - n * n);
    const T dr = dn * kept[3] * r.open * r.shut, dz = gh * (h - n) * z.open * z.shut;
    return {{dr, dz, dn * r.open}, {dr, dz, dn}, gh * z.open, T(0)};
  }
};

// n = tanh(u_n + W_n (r h')): the reset gate before the product. Kept: the three pre-activations.
struct GruBefore {
  static constexpr int gates = 3, kept = 3;
  static constexpr bool memory = false, splits = false, staged = true;

  template <class Math, class T>
  static ELMAN_HD T inner(const T* p, const T* u, T h) {
    return Math::gate(p[0] + u[0]).open * h;
  }
  template <class Math, class T>
  static ELMAN_HD GatesState<T> forward(const T* p, const T* u, T h, T, T* kept) {
    for (int q = 0; q < 3; ++q) kept[q] = p[q] + u[q];
    const Gate<T> z = Math::gate(kept[1]);
    return {z.shut * Math::tanh(kept[2]) + z.open * h, T(0)};
  }
  template <class Math, class T>
  static ELMAN_HD GatesGrad<T, 3> backward(T gh, T, const T* kept, T h, T, T) {
    const Gate<T> z = Math::gate(kept[1]);
    const T n = Math::tanh(kept[2]);
    return {{T(0), gh * (h - n) * z.open * z.shut, gh * z.shut * (T(1) - n * n)}, {}, gh * z.open, T(0)};
  }
  template <class Math, class T>
  static ELMAN_HD GatesGrad<T, 3> inner_backward(T gi, const T* kept, T h) {
    const Gate<T> r = Math::gate(kept[0]);
    return {{gi * h * r.open * r.shut, T(0), T(0)}, {}, gi * r.open, T(0)};
  }
};

// sLSTM: c / n is the mean of all tanh(z~) with the weights exp(i~) f .. f, and h = sigmoid(o~) c / n. n exp(m) is the sum of
// the weights. h does not distinguish pairs of n and m with equal n exp(m), so a step accepts any and leaves the one with n = 1:
// its m exceeds the paper's maximum by at most log(steps), and has no kink. With g, the share of the past:
//
//   g = sigmoid(log f + m' + log n' - i~), or 0 if n' = 0;   c = g c' / n' + (1 - g) tanh(z~), n = 1, m = log(f n' exp(m') + exp(i~))
//
// f is the sigmoid of f~, or exp(f~). Kept: the logit of g, z~, o~, and f~ for the sigmoid.
template <bool exponential>
struct SlstmOf {
  static constexpr int gates = 4, kept = exponential ? 3 : 4, memory = 3;
  static constexpr bool splits = false, staged = false;

  template <class Math, class T>
  static ELMAN_HD GatesState<T, 3> forward(const T* p, const T* u, T, GatesMemory<T, 3> s, T* kept) {
    const T i = p[0] + u[0], f = p[1] + u[1], n = s[1] == T(0) ? T(1) : s[1];
    T log_f = f;
    if constexpr (!exponential) log_f = log_sigmoid<Math>(f), kept[3] = f;
    kept[0] = s[1] == T(0) ? T(-1000) : log_f + (s[2] + Math::log(n)) - i, kept[1] = p[2] + u[2], kept[2] = p[3] + u[3];
    const Gate<T> g = Math::gate(kept[0]);
    const T c = g.open * (s[0] / n) + g.shut * Math::tanh(kept[1]);
    return {Math::gate(kept[2]).open * c, {c, T(1), i - log_sigmoid<Math>(-kept[0])}};
  }
  template <class Math, class T>
  static ELMAN_HD GatesGrad<T, 4, 3> backward(T gh, GatesMemory<T, 3> gs, const T* kept, T, GatesMemory<T, 3> s,
                                              GatesMemory<T, 3> s_new) {
    const Gate<T> g = Math::gate(kept[0]), o = Math::gate(kept[2]);
    const T once = T(1) / (s[1] == T(0) ? T(1) : s[1]), past = s[0] * once, z = Math::tanh(kept[1]);
    const T gc = gs[0] + gh * o.open, share = gc * (past - z) * g.open * g.shut, dm = share + gs[2] * g.open;
    T df = dm;
    if constexpr (!exponential) df = dm * Math::gate(kept[3]).shut;
    return {{gs[2] * g.shut - share, df, gc * g.shut * (T(1) - z * z), gh * s_new[0] * o.open * o.shut},
            {},
            T(0),
            {gc * g.open * once, (dm - gc * g.open * past) * once, dm}};
  }
};
using Slstm = SlstmOf<false>;
using SlstmExp = SlstmOf<true>;

}  // namespace elman::rnn
