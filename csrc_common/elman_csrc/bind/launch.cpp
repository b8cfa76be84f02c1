// Launches compiled modules from Python: opens a module, fills in the structure of a call from tensors and numbers, and calls it.
// It is compiled once per Python and machine, with pybind11's headers and none of torch's; modules contain no Python at all.
//
// Python describes a family of modules as a table: the type of each argument, and the arguments of each function. The module says
// where they lie in its structure. Every tensor is checked against the table: dtype, device, sizes, and whether a kernel can
// read it in place. An error is one line, raised as the exception given to `raises`.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <elman/call.h>

namespace py = pybind11;

namespace {

enum class Type {
  storage,  // the dtype of the first tensor
  compute,  // float, or double beside double
  either,  // storage or compute
  flag,  // bool or uint8
  index,  // int64
  number,  // an int64, not a tensor
  real,  // a double, not a tensor
};
constexpr const char* kTypes[] = {"storage", "compute", "either", "bool", "index", "int", "float"};

struct Field {
  std::string name;
  Type type;
  std::optional<std::string> shape;  // a letter for each size, equal wherever it recurs; U is T + 1, ? any size; none: any shape
  int first,
      strides;  // the first dimension whose stride is written, and how many; one before it is evenly spaced, those after are adjacent
  std::size_t at, each;  // offset in the structure; bytes of one element
  int most;  // maximum length of a list; 0: not a list
  std::size_t count, lengths;  // for a list: offsets of its length and of each element's first size, if any
  PyObject* key;  // the name as a Python object
};
// The calls of a module: Python's table (kernels/family.py), and the offsets of members in its structure.
struct Family {
  std::size_t bytes = 0;
  std::vector<Field> fields;
  std::vector<std::pair<char, std::size_t>> sizes;  // offsets of the letters' values
  std::map<std::string, std::uint64_t> functions;  // the fields that each needs, as bits
};

PyObject* exception = PyExc_RuntimeError;

[[noreturn]] void fail(const std::string& title, const std::string& what) {
  PyErr_SetString(exception, (title + ": " + what).c_str());
  throw py::error_already_set();
}

// A tensor in DLPack's layout, and the table of functions by which torch fills it in without Python. DLPack 1.x.
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

// Names of a tensor's Python methods, used for versions of torch without DLPack's function table. torch's headers would tie
// this module to one version of torch.
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
  static const Names* const made = new Names;  // never destroyed: Python may have ended by then
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
  // Maps DLPack's codes (0 int, 1 unsigned, 2 float, 4 bfloat, 6 bool) to the place in `Names::dtypes`.
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

// A compiled module. It is never closed: a launch may still run, and CUDA keeps its registered functions.
class Module {
  static constexpr const char* kOther =
      " is not the table's: it was made from other sources than this elman-core: update elman-csrc";

 public:
  const std::string title;
  Family family;
  int stored = -1;  // the dtype that it was compiled for; -1: a host module, which serves several

  // fields: (name, type, shape or None, first dimension with a stride, strides, whether a list); sizes and functions by name.
  Module(const std::string& path, const std::string& of, const std::string& title, const py::tuple& fields,
         const std::map<std::string, std::string>& sizes, const std::map<std::string, std::vector<std::string>>& functions)
      : title(title), prefix_("elman_" + of) {
    library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library_) fail(title, "it does not load: " + std::string(dlerror()) + "; delete " + path + " to build it again");
    const auto layout = reinterpret_cast<const CallMember* (*)()>(must_find("layout"));
    std::map<std::string, CallMember> members;
    const CallMember* m = layout();
    for (; m->name; ++m) members[m->name] = *m;
    family.bytes = m->at;
    const auto at = [&](const std::string& name) { return members.count(name) ? members[name].at : 0; };
    std::map<std::string, std::uint64_t> places;
    for (const auto& row : fields) {
      const auto [name, type, shape, first, strides, list] =
          row.cast<std::tuple<std::string, std::string, std::optional<std::string>, int, int, bool>>();
      if (!members.count(name)) continue;  // only the operator takes this argument
      const auto* const known = std::find(std::begin(kTypes), std::end(kTypes), type);
      const std::size_t each = 8 * (1 + strides), bytes = members[name].bytes;
      if (known == std::end(kTypes) || (list ? bytes % each : bytes - each)) fail(title, "its member " + name + kOther);
      places[name] = std::uint64_t{1} << family.fields.size();
      family.fields.push_back({name, static_cast<Type>(known - kTypes), shape, first, strides, at(name), each,
                               list ? static_cast<int>(bytes / each) : 0, at(name + "s"), at(name + "_sizes"),
                               PyUnicode_InternFromString(name.c_str())});
    }
    for (const auto& [letter, name] : sizes) {
      if (!members.count(name)) fail(title, "its member " + name + kOther);
      family.sizes.push_back({letter[0], at(name)});
    }
    for (const auto& [function, names] : functions) {
      std::uint64_t& needed = family.functions[function];
      for (const std::string& name : names) {
        if (!places.count(name)) fail(title, "its member " + name + kOther);
        needed |= places[name];
      }
    }
    if (find("dtype")) stored = static_cast<int>(ask("dtype", {}));
  }

  // Calls a function of up to three integers and returns its result.
  std::int64_t ask(const std::string& function, const py::args& given) const {
    using Number = std::int64_t;
    if (given.size() > 3) fail(title, function + " takes up to three numbers");
    Number n[3] = {};
    for (std::size_t i = 0; i < given.size(); ++i) n[i] = given[i].cast<Number>();
    return reinterpret_cast<Number (*)(Number, Number, Number)>(must_find(function))(n[0], n[1], n[2]);
  }
  py::tuple info() const {
    std::int64_t out[3] = {};
    reinterpret_cast<void (*)(std::int64_t*)>(must_find("info"))(out);
    return py::make_tuple(out[0], out[1], out[2]);
  }
  // Finds a function that takes a call. On the host there is one per dtype.
  void* must_find(const std::string& function, int dtype = -1) const {
    void*& known = found_[{function, dtype}];
    if (!known) known = find(function);
    if (!known && (dtype == 0 || dtype == 1)) known = find(function + (dtype == 0 ? "_float64" : "_float32"));
    if (!known) fail(title, "it has no " + (function.empty() ? prefix_ : function) + " for this dtype");
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

// One call's structure, filled in. It keeps the tensors alive while it exists.
class Call {
 public:
  Call(const Module& module, const py::kwargs& given) : module_(module), memory_(module.family.bytes) { set(given); }

  void run(const std::string& function, const py::kwargs& given) {
    if (given && given.size()) set(given);
    const auto needed = module_.family.functions.find(function);
    if (needed == module_.family.functions.end()) fail("it has no function " + function);
    if (const std::uint64_t missing = needed->second & ~there_)
      for (std::size_t i = 0; i < module_.family.fields.size(); ++i)
        if (missing >> i & 1) fail(module_.family.fields[i].name + " is missing");
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
    const auto& fields = module_.family.fields;
    for (std::size_t i = 0; i < fields.size() && known < given.size(); ++i) {
      const Field& f = fields[i];
      PyObject* value = PyDict_GetItemWithError(given.ptr(), f.key);
      if (!value) continue;
      ++known;
      if (value == Py_None) continue;
      if (f.type == Type::number) put(f.at, integer(f, value));
      else if (f.type == Type::real) put(f.at, PyFloat_AsDouble(value));
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
    for (const auto& [letter, at] : module_.family.sizes) put(at, size(letter));
  }
  std::int64_t integer(const Field& f, PyObject* value) const {
    const long long made = PyLong_AsLongLong(value);
    if (made != -1 || !PyErr_Occurred()) return made;
    PyErr_Clear();
    fail(f.name + " must be a whole number, not " + std::string(py::repr(value)));
  }
  void tensors(const Field& f, PyObject* value) {
    if (!PyList_Check(value) && !PyTuple_Check(value)) fail(f.name + " must be a list of tensors");
    const auto given = py::reinterpret_borrow<py::sequence>(value);
    const int count = static_cast<int>(given.size());
    if (count > f.most) fail(f.name + " has at most " + std::to_string(f.most) + " tensors, not " + std::to_string(count));
    for (int i = 0; i < count; ++i) {
      const std::int64_t length = tensor(f, f.at + i * f.each, f.name + "[" + std::to_string(i) + "]", given[i]);
      if (f.lengths) put(f.lengths + 8 * i, length);
    }
    if (f.count) put(f.count, std::int64_t{count});
  }
  // Writes the address and strides of a tensor; returns its first size.
  std::int64_t tensor(const Field& f, std::size_t at, const std::string& name, py::handle value) {
    const Given x(module_.title, name, value);
    if (device_ == kNone) device_ = x.device, dtype_ = x.dtype;
    if (!x.address) fail(name + " is empty, or has no memory");
    if (x.device != device_) fail(name + " is on another device than the others");
    const bool stored = x.dtype == dtype_ && x.dtype < 4 && (module_.stored < 0 || module_.stored == x.dtype);
    const bool carried = x.dtype == (dtype_ == 0 ? 0 : 1);
    const bool fits = f.type == Type::storage   ? stored
                      : f.type == Type::compute ? carried
                      : f.type == Type::either  ? stored || carried
                      : f.type == Type::flag    ? x.dtype == 4 || x.dtype == 5
                      : f.type == Type::index   ? x.dtype == 6
                                                : true;
    if (!fits) fail(name + " has the wrong dtype, " + std::string(py::str(value.attr(names().dtype))));
    const int dims = f.shape ? static_cast<int>(f.shape->size()) : 0;
    bool same = !f.shape || x.dims == dims;
    for (int i = 0; i < dims && same; ++i) {
      const bool more = (*f.shape)[i] == 'U';
      if ((*f.shape)[i] == '?') continue;
      std::int64_t& known = sizes_[static_cast<unsigned char>(more ? 'T' : (*f.shape)[i])];
      if (!known) known = x.sizes[i] - more;
      if (known >= std::int64_t{1} << 31) fail(name + " is " + x.words() + ": a kernel takes sizes below 2^31");
      same = x.sizes[i] == known + more;
    }
    if (!same) fail(name + " must be " + wanted(*f.shape) + ", not " + x.words());
    const bool even = f.first == 0 || x.sizes[0] == 1 || x.strides[0] == x.sizes[1] * x.strides[1];
    if (!even || !x.contiguous(f.first + f.strides)) fail(name + " does not lie in memory as the kernel reads it");
    put(at, x.address);
    for (int i = 0; i < f.strides; ++i) put(at + 8 * (i + 1), x.strides[f.first + i]);
    return dims ? x.sizes[0] : 1;
  }
  std::string wanted(const std::string& shape) const {
    std::string said = "(";
    for (const char& c : shape) {
      const std::int64_t known = size(c == 'U' ? 'T' : c);
      said += (&c == &shape[0] ? "" : ", ") + (known ? std::to_string(known + (c == 'U')) : std::string(1, c));
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
      .def(py::init<const std::string&, const std::string&, const std::string&, const py::tuple&,
                    const std::map<std::string, std::string>&, const std::map<std::string, std::vector<std::string>>&>())
      .def(
          "call", [](const Module& module, const py::kwargs& given) { return Call(module, given); }, py::keep_alive<0, 1>())
      .def("run", [](const Module& module, const std::string& function,
                     const py::kwargs& given) { Call(module, given).run(function, {}); })
      .def("ask", &Module::ask)
      .def("info", &Module::info);
  py::class_<Call>(m, "Call").def("run", &Call::run).def_property_readonly("address", &Call::address);
  m.def("raises", [](const py::object& type) { exception = py::object(type).release().ptr(); });
}
