// Launches of compiled modules from Python: opens a module, fills in the structure of a call from tensors and numbers, and calls it.
// Compiled once for a Python and a machine, with the headers of pybind11 and none of torch; modules have no Python in them at all.
//
// A family of modules is a table (families(), below): where each argument lies in its structure, what it must be, and which arguments a
// function needs. To add a family, write its table. Every tensor is checked against it: dtype, device, sizes, and that a kernel can
// read it where it lies. What is wrong is one line, raised as the exception that `raises` was given.
#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <elman/causal_conv_call.h>
#include <elman/decode_call.h>
#include <elman/dense_call.h>
#include <elman/elementwise_call.h>
#include <elman/gates_call.h>
#include <elman/matrix_state_call.h>
#include <elman/rows_call.h>

namespace py = pybind11;

namespace {

enum class Kind {
  whole,  // a contiguous tensor: its address
  rows,  // adjacent elements of the last dimension: address, then its first strides
  number,  // int64
  real,  // double
};
enum class Type {
  storage,  // the dtype of the first tensor
  state,  // float, or double beside double
  either,  // one of these
  flag,  // bool or uint8
  index,  // int64
  any,
};

struct Field {
  const char* name;
  std::size_t at;  // in the structure
  Kind kind = Kind::number;
  Type type = Type::storage;
  const char* shape = "";  // a letter for each size, the same wherever it occurs; U is T + 1, ? anything; null: of any shape
  int most = 0;  // of a list; 0: one by itself
  std::size_t count = 0;  // where the length of the list is written, if anywhere
  std::size_t lengths = 0;  // of a list: where the first size of each is written, if anywhere
  int strides = 2;  // of rows: how many are written; what comes after them is adjacent
  int first = 0;  // from which dimension on; one before it lies evenly
  PyObject* key = nullptr;  // the name, as Python holds it
};
struct Function {
  const char* name;
  const char* needs;  // names of arguments
  std::uint64_t needed = 0;  // and their places among the fields, as bits
};
struct Family {
  std::size_t bytes;
  std::vector<Field> fields;
  std::vector<std::pair<char, std::size_t>> sizes;  // where the values of letters are written
  std::vector<Function> functions;
};

#define AT(member) offsetof(Call, member)

Field whole(const char* name, std::size_t at, const char* shape, Type type = Type::storage) {
  return {name, at, Kind::whole, type, shape};
}
Field view(const char* name, std::size_t at, const char* shape, int most = 0, std::size_t count = 0) {
  return {name, at, Kind::rows, Type::storage, shape, most, count};
}
Field number(const char* name, std::size_t at, Kind kind = Kind::number) { return {name, at, kind}; }
Field list(Field of, int most, std::size_t count = 0) {
  of.most = most, of.count = count;
  return of;
}

Family dense() {
  using Call = DenseCall;
  const Type state = Type::state;
  return {sizeof(Call),
          {view("main", AT(main), "TBd"),
           view("extra", AT(extra), "TBd", 4, AT(extras)),
           whole("w", AT(w), "d?"),
           whole("h0", AT(h0), "Bd", state),
           whole("history", AT(history), "UBd"),
           whole("y", AT(y), "TBd"),
           whole("last", AT(last), "Bd", state),
           whole("g_last", AT(g_last), "Bd", state),
           whole("da", AT(da), "TBd"),
           list(whole("dextra", AT(dextra), "TBd"), 4),
           whole("dh0", AT(dh0), "Bd", state),
           whole("mask", AT(mask), "TB", Type::flag),
           whole("a", AT(a), "TBd"),
           view("x", AT(x), "TBd"),
           whole("bias", AT(bias), "d", state),
           whole("sums", AT(sums), "UBd"),
           whole("dx", AT(dx), "TBd"),
           whole("dbias", AT(dbias), "?d", state),
           whole("product", AT(product), "Bd", state),
           whole("state", AT(state), "Bd", state),
           number("error", AT(error)),
           number("stream", AT(stream)),
           number("rows", AT(rows)),
           number("groups", AT(groups)),
           number("delay", AT(delay)),
           number("timeout_ns", AT(timeout_ns)),
           number("slots", AT(slots)),
           number("t", AT(t))},
          {{'T', AT(steps)}, {'B', AT(batch)}, {'d', AT(width)}},
          {{"forward", "main w h0 history y last"},
           {"backward", "main w history g_last da dh0"},
           {"forward_step", "main w history y product state"},
           {"backward_step", "main w history da product state"}}};
}

Family gates() {
  using Call = GatesCall;
  const Type state = Type::state;
  return {sizeof(Call),
          {view("main", AT(main), "TB?"),
           whole("w", AT(w), "?d"),
           whole("bias", AT(bias), "?", state),
           whole("h0", AT(h0), "Bd", state),
           whole("s0", AT(s0), "Bd", state),
           whole("y", AT(y), "TBd"),
           whole("last", AT(last), "Bd", state),
           whole("s_last", AT(s_last), "Bd", state),
           whole("history", AT(history), "UBd"),
           whole("kept", AT(kept), "TB?"),
           whole("memory", AT(memory), "UBd"),
           whole("g_last", AT(g_last), "Bd", state),
           whole("g_s_last", AT(g_s_last), "Bd", state),
           whole("dp", AT(dp), "TB?"),
           whole("du", AT(du), "TB?"),
           whole("dbias", AT(dbias), "B?", state),
           whole("dh0", AT(dh0), "Bd", state),
           whole("ds0", AT(ds0), "Bd", state),
           whole("mask", AT(mask), "TB", Type::flag),
           number("error", AT(error)),
           number("stream", AT(stream)),
           number("rows", AT(rows)),
           number("groups", AT(groups)),
           number("timeout_ns", AT(timeout_ns))},
          {{'T', AT(steps)}, {'B', AT(batch)}, {'d', AT(width)}},
          {{"forward", "main w h0 y last history"}, {"backward", "main w history kept g_last dp dbias dh0"}}};
}

Field row(const char* name, std::size_t at, const char* shape) {
  Field made = view(name, at, shape);
  made.strides = 1;
  return made;
}

Family decode_linear() {
  using Call = DecodeLinearCall;
  Field more = list(whole("more", AT(more), "?K"), 4, AT(maps));
  more.lengths = AT(more_outputs);
  return {sizeof(Call),
          {row("x", AT(x), "BK"), whole("weight", AT(weight), "NK"), whole("bias", AT(bias), "N"), whole("out", AT(out), "BN"),
           more, list(whole("more_out", AT(more_out), "B?"), 4), number("activated", AT(activated)), number("early", AT(early)),
           number("stream", AT(stream))},
          {{'B', AT(rows)}, {'K', AT(inputs)}, {'N', AT(outputs)}},
          {{"", "x weight out"}}};
}

Family decode_step() {
  using Call = DecodeStepCall;
  return {sizeof(Call),
          {row("x", AT(x), "BK"), row("u", AT(x), "BN"), whole("weight", AT(weight), "NK"), whole("bias", AT(bias), "N"),
           whole("w", AT(w), "NN"), whole("h", AT(h), "BN", Type::state), list(row("extra", AT(extra), "BN"), 4, AT(extras)),
           whole("out", AT(out), "BN"), whole("last", AT(last), "BN", Type::state), number("early", AT(early)),
           number("stream", AT(stream))},
          {{'B', AT(rows)}, {'K', AT(inputs)}, {'N', AT(outputs)}},
          {{"", "w h out last"}}};
}

Family decode_norm() {
  using Call = DecodeNormCall;
  return {sizeof(Call),
          {row("x", AT(x), "BD"), whole("weight", AT(weight), "D"), whole("residual", AT(residual), "BD", Type::state),
           whole("out", AT(out), "BD"), whole("stream_out", AT(stream_out), "BD", Type::state), number("eps", AT(eps), Kind::real),
           number("early", AT(early)), number("stream", AT(stream))},
          {{'B', AT(rows)}, {'D', AT(width)}},
          {{"", "x weight out stream_out"}}};
}

Family decode_draw() {
  using Call = DecodeDrawCall;
  return {sizeof(Call),
          {row("logits", AT(logits), "BV"), whole("waits", AT(waits), "BV", Type::state), whole("seen", AT(seen), "BV", Type::flag),
           whole("drawn", AT(drawn), "B", Type::index), whole("shown", AT(shown), "B", Type::index),
           number("penalty", AT(penalty), Kind::real), number("temperature", AT(temperature), Kind::real),
           number("below", AT(below), Kind::real), number("top_k", AT(top_k)), number("early", AT(early)),
           number("stream", AT(stream))},
          {{'B', AT(rows)}, {'V', AT(classes)}},
          {{"", "logits drawn shown"}}};
}

// Of a [B,T,...] tensor: the stride of its steps.
Field timed(const char* name, std::size_t at, const char* shape, Type type = Type::storage) {
  Field made = view(name, at, shape);
  made.type = type, made.strides = 1, made.first = 1;
  return made;
}

Family matrix() {
  using Call = MatrixCall;
  namespace matrix = elman::matrix;
  const Type state = Type::state, either = Type::either;
  return {sizeof(Call),
          {timed("q", AT(q), "BT?N"),
           timed("k", AT(k), "BT?N"),
           list(timed("vector", AT(vector), "BTHN"), matrix::kMostVectors, AT(vectors)),
           list(timed("line", AT(line), "BT?V"), matrix::kMostLines, AT(lines)),
           list(timed("scalar", AT(scalar), "BTH", either), matrix::kMostScalars, AT(scalars)),
           list(whole("param", AT(param), "HV", state), matrix::kMostParams, AT(params)),
           whole("a_log", AT(a_log), "H", state),
           whole("dt_bias", AT(dt_bias), "H", state),
           whole("mask", AT(mask), "BT", Type::flag),
           whole("s0", AT(s0), "BHNV", state),
           whole("s1", AT(s1), "BHNV", state),
           whole("o", AT(o), "BTHV"),
           whole("saved", AT(saved), nullptr, either),
           whole("dy", AT(dy), "BTHV"),
           whole("ds1", AT(ds1), "BHNV", state),
           whole("ds0", AT(ds0), "BHNV", state),
           timed("dq", AT(dq), "BTHN"),
           timed("dk", AT(dk), "BTHN"),
           list(timed("dvector", AT(dvector), "BTHN"), matrix::kMostVectors),
           list(timed("dline", AT(dline), "BTHV"), matrix::kMostLines),
           list(timed("dscalar", AT(dscalar), "BTH", either), matrix::kMostScalars),
           list(whole("dparam", AT(dparam), "?HV", state), matrix::kMostParams),
           whole("dhead", AT(dhead), nullptr, state),
           whole("da_log", AT(da_log), nullptr, state),
           whole("ddt_bias", AT(ddt_bias), nullptr, state),
           whole("parts", AT(parts), nullptr, state),
           number("shared", AT(shared)),
           number("interval", AT(interval)),
           number("state_line", AT(state_line)),
           number("state_row", AT(state_row)),
           number("stream", AT(stream))},
          {{'B', AT(batch)}, {'T', AT(steps)}, {'H', AT(heads)}},
          {{"forward", "q k line s1 o"}, {"backward", "q k line saved dy ds0 dq dk dline"}}};
}

Family rows() {
  using Call = RowsCall;
  const Type state = Type::state;
  return {sizeof(Call),
          {timed("q", AT(q), "BT?K"),
           timed("k", AT(k), "BT?K"),
           timed("v", AT(v), "BTHV"),
           whole("f", AT(f), "BTH", state),
           whole("w", AT(w), "HVV"),
           whole("mask", AT(mask), "BT", Type::flag),
           whole("starts", AT(starts), "BT", Type::flag),
           whole("s0", AT(s0), "BHKV", state),
           whole("s1", AT(s1), "BHKV", state),
           whole("o", AT(o), "BTHV"),
           whole("saved", AT(saved), "BH?KV", state),
           whole("dy", AT(dy), "BTHV"),
           whole("ds1", AT(ds1), "BHKV", state),
           whole("ds0", AT(ds0), "BHKV", state),
           whole("dq", AT(dq), "BTHK"),
           whole("dk", AT(dk), "BTHK"),
           whole("dv", AT(dv), "BTHV"),
           whole("df", AT(df), "BTH", state),
           whole("dw", AT(dw), "BH?VV", state),
           number("shared", AT(shared)),
           number("stream", AT(stream))},
          {{'B', AT(batch)}, {'T', AT(steps)}, {'H', AT(heads)}},
          {{"forward", "q k v f w s1 o"}, {"backward", "q k v f w saved dy ds0 dq dk dv df dw"}}};
}

Family elementwise() {
  using Call = ElementwiseCall;
  const Type state = Type::state;
  return {sizeof(Call),
          {view("stream", AT(stream), "TBd", elman::elementwise::kMostStreams), view("y", AT(y), "TBd"),
           list(whole("vector", AT(vector), "d", state), elman::elementwise::kMostVectors), whole("h0", AT(h0), "SBd", state),
           whole("last", AT(last), "SBd", state), whole("checkpoints", AT(checkpoints), "?SBd", state),
           whole("mask", AT(mask), "TB", Type::flag), whole("starts", AT(starts), "TB", Type::flag),
           whole("initial", AT(initial), "Sd", state), view("gy", AT(gy), "TBd"),
           view("dstream", AT(dstream), "TBd", elman::elementwise::kMostStreams), whole("g_last", AT(g_last), "SBd", state),
           whole("dh0", AT(dh0), "SBd", state), whole("dvector", AT(dvector), "?Bd", state),
           whole("dinitial", AT(dinitial), "SBd", state), number("early", AT(early)), number("cuda_stream", AT(cuda_stream))},
          {{'T', AT(steps)}, {'B', AT(batch)}, {'d', AT(width)}},
          {{"forward", ""}, {"backward", ""}, {"step", ""}}};
}

Family causal_conv() {
  using Call = CausalConvCall;
  const Type state = Type::state;
  return {sizeof(Call),
          {view("x", AT(x), "TBC"), view("y", AT(y), "TBC"), view("dy", AT(dy), "TBC"), view("dx", AT(dx), "TBC"),
           whole("weight", AT(weight), "CK", state), whole("bias", AT(bias), "C", state), whole("window", AT(window), "B?C", state),
           whole("last", AT(last), "B?C", state), whole("dlast", AT(dlast), "B?C", state),
           whole("dwindow", AT(dwindow), "B?C", state), whole("shares", AT(shares), "??C", state),
           whole("mask", AT(mask), "TB", Type::flag), whole("starts", AT(starts), "TB", Type::flag), number("silu", AT(silu)),
           number("early", AT(early)), number("cuda_stream", AT(cuda_stream))},
          {{'T', AT(steps)}, {'B', AT(batch)}, {'C', AT(width)}},
          {{"forward", ""}, {"backward", ""}}};
}

bool contains(const char* words, const char* word) {
  const std::size_t length = std::strlen(word);
  for (const char* at = std::strstr(words, word); at; at = std::strstr(at + 1, word))
    if ((at == words || at[-1] == ' ') && (at[length] == ' ' || !at[length])) return true;
  return false;
}

Family finished(Family family) {
  for (std::size_t i = 0; i < family.fields.size(); ++i) {
    family.fields[i].key = PyUnicode_InternFromString(family.fields[i].name);
    for (Function& f : family.functions)
      if (contains(f.needs, family.fields[i].name)) f.needed |= std::uint64_t{1} << i;
  }
  return family;
}

const std::map<std::string, Family>& families() {
  static const auto* const all = new std::map<std::string, Family>{
      {"dense", finished(dense())},
      {"gates", finished(gates())},
      {"decode_linear", finished(decode_linear())},
      {"decode_step", finished(decode_step())},
      {"decode_norm", finished(decode_norm())},
      {"decode_draw", finished(decode_draw())},
      {"matrix", finished(matrix())},
      {"rows", finished(rows())},
      {"elementwise", finished(elementwise())},
      {"causal_conv", finished(causal_conv())},
  };
  return *all;
}

PyObject* exception = PyExc_RuntimeError;

[[noreturn]] void fail(const std::string& title, const std::string& what) {
  PyErr_SetString(exception, (title + ": " + what).c_str());
  throw py::error_already_set();
}

// A tensor as DLPack lays it out, and the functions by which torch fills one in without a detour through Python. DLPack 1.x.
struct Lent {
  std::byte* data;
  std::int32_t device_type, device, dims;  // device_type 2: CUDA
  std::uint8_t code, bits;
  std::uint16_t lanes;
  const std::int64_t *sizes, *strides;
  std::uint64_t offset;
};
struct Exchange {
  std::uint32_t major, minor;
  const void *older, *managed[3];
  int (*lend)(PyObject*, Lent*);
};

// What is asked of a tensor: torch's headers would tie this module to one version of torch. Versions that lend no tensors are asked
// by the methods that Python sees.
struct Names {
  py::object tensor, dtypes[7];  // of elman/dtype.h, then bool, uint8, int64
  const Exchange* exchange = nullptr;
  py::str data_ptr{"data_ptr"}, shape{"shape"}, stride{"stride"}, dtype{"dtype"}, get_device{"get_device"};
  Names() {
    const py::module_ torch = py::module_::import("torch");
    tensor = torch.attr("Tensor");
    const char* known[] = {"float64", "float32", "bfloat16", "float16", "bool", "uint8", "int64"};
    for (int i = 0; i < 7; ++i) dtypes[i] = torch.attr(known[i]);
    const py::object table = py::getattr(tensor, "__dlpack_c_exchange_api__", py::none());
    if (PyCapsule_IsValid(table.ptr(), "dlpack_exchange_api"))
      exchange = static_cast<const Exchange*>(PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api"));
    if (exchange && exchange->major != 1) exchange = nullptr;
  }
};
const Names& names() {
  static const Names* const made = new Names;  // never destroyed: Python may be gone by then
  return *made;
}

constexpr int kMostDims = 6;
struct Given {
  std::uint64_t address;
  int dtype, device, dims;
  std::int64_t sizes[kMostDims], strides[kMostDims];

  Given(const std::string& title, const std::string& name, py::handle x) {
    const Names& n = names();
    if (!py::isinstance(x, n.tensor)) fail(title, name + " must be a tensor, not " + std::string(py::repr(x)));
    if (Lent lent; n.exchange && n.exchange->lend && !n.exchange->lend(x.ptr(), &lent)) {
      address = reinterpret_cast<std::uint64_t>(lent.data) + lent.offset, device = lent.device_type == 2 ? lent.device : -1;
      dtype = code(lent.code, lent.bits), dims = lent.dims;
      check_dims(title, name);
      std::copy_n(lent.sizes, dims, sizes), std::copy_n(lent.strides, dims, strides);
      return;
    }
    PyErr_Clear();
    address = call(x, n.data_ptr).cast<std::uint64_t>(), device = call(x, n.get_device).cast<int>();
    const py::object of = x.attr(n.dtype);
    for (dtype = 0; dtype < 7 && !of.is(n.dtypes[dtype]);) ++dtype;
    const py::tuple shape = x.attr(n.shape), stride = py::reinterpret_steal<py::tuple>(call(x, n.stride).release());
    dims = static_cast<int>(shape.size());
    check_dims(title, name);
    for (int i = 0; i < dims; ++i)
      sizes[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), i)),
      strides[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(stride.ptr(), i));
  }
  // Of DLPack's codes (0 whole, 1 natural, 2 real, 4 bfloat, 6 bool): the place among `Names::dtypes`.
  static int code(int kind, int bits) {
    if (kind == 2) return bits == 64 ? 0 : bits == 32 ? 1 : bits == 16 ? 3 : 7;
    return kind == 4 ? 2 : kind == 6 ? 4 : kind == 1 && bits == 8 ? 5 : kind == 0 && bits == 64 ? 6 : 7;
  }
  void check_dims(const std::string& title, const std::string& name) const {
    if (dims > kMostDims) fail(title, name + " has " + std::to_string(dims) + " dimensions");
  }
  static py::object call(py::handle x, const py::str& method) {
    PyObject* made = PyObject_CallMethodNoArgs(x.ptr(), method.ptr());
    if (!made) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
  }
  bool contiguous(int from) const {
    std::int64_t wanted = 1;
    for (int i = dims - 1; i >= from; wanted *= sizes[i--])
      if (sizes[i] != 1 && strides[i] != wanted) return false;
    return true;
  }
  std::string words() const {
    std::string said = "(";
    for (int i = 0; i < dims; ++i) said += (i ? ", " : "") + std::to_string(sizes[i]);
    return said + ")";
  }
};

// A compiled module. Never closed: a launch may still run, and CUDA keeps what it has registered.
class Module {
 public:
  const std::string title;
  const Family* family = nullptr;
  int stored = -1;  // the dtype that it was compiled for; -1: a module of the host, which serves several

  Module(const std::string& path, const std::string& of, const std::string& title) : title(title), prefix_("elman_" + of) {
    const auto found = families().find(of);
    if (found == families().end()) fail(title, "there is no family of modules called " + of);
    family = &found->second;
    library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library_) fail(title, "it does not load: " + std::string(dlerror()) + "; delete " + path + " to build it again");
    if (!find("call_bytes")) fail(title, "it has no " + of + " for this dtype");
    if (ask("call_bytes", {}) != static_cast<std::int64_t>(family->bytes))
      fail(title, "it was made from other sources than this elman-core: update elman-csrc");
    if (find("dtype")) stored = static_cast<int>(ask("dtype", {}));
  }

  // What a function of up to three whole numbers says.
  std::int64_t ask(const std::string& function, const py::args& given) const {
    using Number = std::int64_t;
    if (given.size() > 3) fail(title, function + " takes up to three numbers");
    Number n[3] = {};
    for (std::size_t i = 0; i < given.size(); ++i) n[i] = given[i].cast<Number>();
    return reinterpret_cast<Number (*)(Number, Number, Number)>(must_find(function))(n[0], n[1], n[2]);
  }
  py::tuple info() const {
    std::int64_t out[4] = {};
    reinterpret_cast<void (*)(std::int64_t*)>(must_find("info"))(out);
    return py::make_tuple(out[0], out[1], out[2], out[3]);
  }
  // A function of a call. On the host there is one for each dtype.
  void* must_find(const std::string& function, int dtype = -1) const {
    void*& known = found_[{function, dtype}];
    if (!known) known = find(function);
    if (!known && (dtype == 0 || dtype == 1)) known = find(function + (dtype == 0 ? "_float64" : "_float32"));
    if (!known) fail(title, "it has no " + function + " for this dtype");
    return known;
  }

 private:
  void* find(const std::string& function) const {
    return dlsym(library_, (function.empty() ? prefix_ : prefix_ + "_" + function).c_str());
  }

  std::string prefix_;
  void* library_;
  mutable std::map<std::pair<std::string, int>, void*> found_;
};

// One call's structure, filled in. It holds on to the tensors until it is gone.
class Call {
 public:
  Call(const Module& module, const py::kwargs& given) : module_(module), memory_(module.family->bytes) { set(given); }

  void run(const std::string& function, const py::kwargs& given) {
    if (given && given.size()) set(given);
    const Function* wanted = nullptr;
    for (const Function& f : module_.family->functions)
      if (function == f.name) wanted = &f;
    if (!wanted) fail("it has no function " + function);
    if (const std::uint64_t missing = wanted->needed & ~there_)
      for (std::size_t i = 0; i < module_.family->fields.size(); ++i)
        if (missing >> i & 1) fail(std::string(module_.family->fields[i].name) + " is missing");
    const auto call = reinterpret_cast<const char* (*)(const void*)>(module_.must_find(function, dtype_));
    const char* said;
    {
      const py::gil_scoped_release release;
      said = call(memory_.data());
    }
    if (said) fail(said);
  }

  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory_.data()); }

 private:
  [[noreturn]] void fail(const std::string& what) const { ::fail(module_.title, what); }

  void set(const py::kwargs& given) {
    held_.append(given);
    std::size_t known = 0;
    const auto& fields = module_.family->fields;
    for (std::size_t i = 0; i < fields.size() && known < given.size(); ++i) {
      const Field& f = fields[i];
      PyObject* value = PyDict_GetItemWithError(given.ptr(), f.key);
      if (!value) continue;
      ++known;
      if (value == Py_None) continue;
      if (f.kind == Kind::number) put(f.at, integer(f, value));
      else if (f.kind == Kind::real) put(f.at, PyFloat_AsDouble(value));
      else if (f.most) tensors(f, value);
      else tensor(f, f.at, f.name, value);
      there_ |= std::uint64_t{1} << i;
    }
    if (PyErr_Occurred()) throw py::error_already_set();
    for (const auto& item : given) {
      if (known == given.size()) break;
      bool found = false;
      for (const Field& f : fields) found = found || item.first.cast<std::string>() == f.name;
      if (!found) fail("there is no argument " + item.first.cast<std::string>());
    }
    for (const auto& [letter, at] : module_.family->sizes) put(at, size(letter));
  }
  std::int64_t integer(const Field& f, PyObject* value) const {
    const long long made = PyLong_AsLongLong(value);
    if (made != -1 || !PyErr_Occurred()) return made;
    PyErr_Clear();
    fail(std::string(f.name) + " must be a whole number, not " + std::string(py::repr(value)));
  }
  void tensors(const Field& f, PyObject* value) {
    if (!PyList_Check(value) && !PyTuple_Check(value)) fail(std::string(f.name) + " must be a list of tensors");
    const auto given = py::reinterpret_borrow<py::sequence>(value);
    const int count = static_cast<int>(given.size());
    if (count > f.most)
      fail(std::string(f.name) + " has at most " + std::to_string(f.most) + " tensors, not " + std::to_string(count));
    const std::size_t each = 8 * (f.kind == Kind::rows ? 1 + f.strides : 1);
    for (int i = 0; i < count; ++i) {
      const std::int64_t length = tensor(f, f.at + i * each, std::string(f.name) + "[" + std::to_string(i) + "]", given[i]);
      if (f.lengths) put(f.lengths + 8 * i, length);
    }
    if (f.count) put(f.count, std::int64_t{count});
  }
  // Writes the address and strides of a tensor; its first size.
  std::int64_t tensor(const Field& f, std::size_t at, const std::string& name, py::handle value) {
    const Given x(module_.title, name, value);
    if (device_ == kNone) device_ = x.device, dtype_ = x.dtype;
    if (!x.address) fail(name + " is empty, or has no memory");
    if (x.device != device_) fail(name + " is on another device than the others");
    const bool stored = x.dtype == dtype_ && x.dtype < 4 && (module_.stored < 0 || module_.stored == x.dtype);
    const bool carried = x.dtype == (dtype_ == 0 ? 0 : 1);
    const bool fits = f.type == Type::storage  ? stored
                      : f.type == Type::state  ? carried
                      : f.type == Type::either ? stored || carried
                      : f.type == Type::flag   ? x.dtype == 4 || x.dtype == 5
                      : f.type == Type::index  ? x.dtype == 6
                                               : true;
    if (!fits) fail(name + " has the wrong dtype, " + std::string(py::str(value.attr(names().dtype))));
    const int dims = f.shape ? static_cast<int>(std::strlen(f.shape)) : 0;
    bool same = !f.shape || x.dims == dims;
    for (int i = 0; i < dims && same; ++i) {
      const bool more = f.shape[i] == 'U';
      if (f.shape[i] == '?') continue;
      std::int64_t& known = sizes_[static_cast<unsigned char>(more ? 'T' : f.shape[i])];
      if (!known) known = x.sizes[i] - more;
      same = x.sizes[i] == known + more;
    }
    if (!same) fail(name + " must be " + wanted(f.shape) + ", not " + x.words());
    const bool even = f.kind == Kind::whole || f.first == 0 || x.sizes[0] == 1 || x.strides[0] == x.sizes[1] * x.strides[1];
    if (!even || !x.contiguous(f.kind == Kind::whole ? 0 : f.first + f.strides))
      fail(name + " does not lie in memory as the kernel reads it");
    put(at, x.address);
    for (int i = 0; f.kind == Kind::rows && i < f.strides; ++i) put(at + 8 * (i + 1), x.strides[f.first + i]);
    return dims ? x.sizes[0] : 1;
  }
  std::string wanted(const char* shape) const {
    std::string said = "(";
    for (const char* c = shape; *c; ++c) {
      const std::int64_t known = size(*c == 'U' ? 'T' : *c);
      said += (c == shape ? "" : ", ") + (known ? std::to_string(known + (*c == 'U')) : std::string(1, *c));
    }
    return said + ")";
  }
  std::int64_t size(char letter) const { return sizes_[static_cast<unsigned char>(letter)]; }
  template <class T>
  void put(std::size_t at, T value) {
    static_assert(sizeof(T) == 8);
    std::memcpy(memory_.data() + at, &value, sizeof(T));
  }

  static constexpr int kNone = -2;
  const Module& module_;
  std::vector<std::byte> memory_;
  std::int64_t sizes_[128] = {};
  std::uint64_t there_ = 0;
  int device_ = kNone, dtype_ = -1;
  py::list held_;
};

}  // namespace

PYBIND11_MODULE(ELMAN_MODULE, m) {
  py::class_<Module>(m, "Module")
      .def(py::init<const std::string&, const std::string&, const std::string&>())
      .def(
          "call", [](const Module& module, const py::kwargs& given) { return Call(module, given); }, py::keep_alive<0, 1>())
      .def("run", [](const Module& module, const std::string& function,
                     const py::kwargs& given) { Call(module, given).run(function, {}); })
      .def("ask", &Module::ask)
      .def("info", &Module::info);
  py::class_<Call>(m, "Call").def("run", &Call::run).def_property_readonly("address", &Call::address);
  m.def("raises", [](const py::object& type) { exception = py::object(type).release().ptr(); });
}
