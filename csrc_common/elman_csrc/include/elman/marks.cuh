// Masks and starts of a warp's next steps, for one row. `g` has T, B and two [T,B] tensors of bytes, either of which may be null: in mask, 0 says that the
// step does not exist; in starts, 1 says that a document begins.
#pragma once

#include <cstddef>

namespace elman {

struct Marks {
  unsigned held = 0, starts = 0;  // bit s: step s
  __device__ bool is_held(int s) const { return held >> s & 1; }
  __device__ bool begins(int s) const { return starts >> s & 1; }
};

// Lane s loads the marks of step s, out of `steps` steps, two rounds before their use.
template <class G, int steps>
class MarksAhead {
 public:
  __device__ MarksAhead(const G& g, int b, int lane) : g_(g), b_(b), lane_(lane) {}
  __device__ void load(int first) {
    soon_ = later_;
    const int t = first + lane_;
    const bool there = lane_ < steps && t >= 0 && t < g_.T;
    const std::ptrdiff_t i = std::ptrdiff_t(t) * g_.B + b_;
    later_.kept = there && g_.mask ? g_.mask[i] : 1;
    later_.starts = there && g_.starts ? g_.starts[i] : 0;
  }
  __device__ Marks next(int first) {  // also requests those from `first` on
    const Bytes now = soon_;
    load(first);
    return {__ballot_sync(~0u, now.kept == 0), __ballot_sync(~0u, now.starts != 0)};
  }

 private:
  struct Bytes {
    unsigned char kept = 1, starts = 0;
  };
  const G& g_;
  int b_, lane_;
  Bytes soon_, later_;
};

}  // namespace elman
