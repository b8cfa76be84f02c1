// Shared by the C interfaces of all modules. Tensors are passed as addresses, without headers of torch or Python, so a module works with
// every version of both.
//
//   elman_FAMILY_layout() -> the offsets of a call's members, by name; the last entry has no name and holds the size of the call
#pragma once

#include <cstddef>
#include <cstdint>

#define ELMAN_EXPORT extern "C" __attribute__((visibility("default")))

struct CallView {  // a [T,B,d] tensor of adjacent channels; strides count elements
  std::uint64_t address;
  std::int64_t t, b;
};
struct CallRows {  // a tensor whose rows, or time steps, are `step` elements apart; elements inside are adjacent
  std::uint64_t address;
  std::int64_t step;
};
struct CallMember {
  const char* name;
  std::size_t at, bytes;
};

// Follows the structure of a family as ELMAN_LAYOUT(family, its type, up to 64 members...).
#define ELMAN_LAYOUT(family, Type, ...)                                                               \
  ELMAN_EXPORT const CallMember* elman_##family##_layout() {                                          \
    using Call = Type;                                                                                \
    static const CallMember all[] = {ELMAN_64(ELMAN_MEMBERS(__VA_ARGS__)){nullptr, sizeof(Call), 0}}; \
    return all;                                                                                       \
  }
#define ELMAN_MEMBERS(member, ...) \
  {#member, offsetof(Call, member), sizeof(Call::member)}, __VA_OPT__(ELMAN_MORE ELMAN_NOTHING()(__VA_ARGS__))
#define ELMAN_MORE() ELMAN_MEMBERS
#define ELMAN_NOTHING
#define ELMAN_64(...) ELMAN_16(ELMAN_16(ELMAN_16(ELMAN_16(__VA_ARGS__))))
#define ELMAN_16(...) ELMAN_4(ELMAN_4(ELMAN_4(ELMAN_4(__VA_ARGS__))))
#define ELMAN_4(...) ELMAN_1(ELMAN_1(ELMAN_1(ELMAN_1(__VA_ARGS__))))
#define ELMAN_1(...) __VA_ARGS__

namespace elman {

template <class T>
T* at(std::uint64_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace elman
