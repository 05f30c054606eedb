// The host's part of a read, never measured on a GPU: checks of tensors, allocations, and a node of autograd.
//
// Where tensors are small, a GPU waits for its host, and this work takes several times as long in Python. `direct.py`
// says which reads come here, and has the launchers of the kernels.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <functional>

namespace py = pybind11;

namespace attnres {

using at::Tensor;
using at::TensorList;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Shape = std::vector<int64_t>;

// Triton compiles a kernel for pointers that are multiples of it, and another for the rest.
constexpr uintptr_t kBytes = 16;

// What a kernel requires of a tensor.
struct Kind {
  at::ScalarType dtype = at::kFloat;
  Shape shape;
  at::Device device = at::kCPU;

  // Whether kernels take the tensor as it is, at an address for which Triton compiled them.
  bool fits(const Tensor& tensor) const {
    // A subclass that is implemented in Python may have its numbers elsewhere.
    if (tensor.key_set().has(c10::DispatchKey::Python) || !tensor.has_storage() || tensor.scalar_type() != dtype ||
        tensor.layout() != at::kStrided || tensor.device() != device || tensor.sizes() != shape ||
        !tensor.is_contiguous() || tensor.is_neg()) {
      return false;
    }
    const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    return address != 0 && address % kBytes == 0;  // a tensor whose memory was freed is at 0
  }
};

// All that reads of the same shapes share. Its inputs are the query, the key norm's weight, with `has_norm` the weight
// of the norm that follows, and the sources.
struct ReadPlan : torch::CustomClassHolder {
  Kind source, statistics, scratch;  // `scratch` is the kind of the depth weights too
  std::vector<Kind> weights;
  bool has_norm;
  int64_t tokens, count, padding, programs;
  Shape partial_shape, grads_shape;
  py::object forward, finish;  // launchers
  py::object backward;         // `ReadSizes.backward`, which returns a launcher
  py::object general_backward;

  // The last owner may be a node that autograd frees in a thread without Python's lock, or after Python has ended.
  ~ReadPlan() override {
    const auto objects = {&forward, &backward, &finish, &general_backward};
    if (!Py_IsInitialized()) {
      for (auto* object : objects) {
        object->release();
      }
      return;
    }
    py::gil_scoped_acquire lock;
    for (auto* object : objects) {
      *object = py::object();
    }
  }
};

// The arguments of a read that are no tensors.
struct Call : torch::CustomClassHolder {
  c10::intrusive_ptr<ReadPlan> plan;
  double eps;
  bool is_sum, fuse_later_grads, needs_weights;
  double norm_eps;

  Call(
      c10::intrusive_ptr<ReadPlan> plan, double eps, bool is_sum, bool fuse_later_grads, bool needs_weights,
      double norm_eps)
      : plan(std::move(plan)), eps(eps), is_sum(is_sum), fuse_later_grads(fuse_later_grads),
        needs_weights(needs_weights), norm_eps(norm_eps) {}

  double factor() const { return is_sum ? static_cast<double>(plan->count) : 1.0; }
};

struct Outputs {
  Tensor result, hidden, statistics;  // `hidden` is the input of the norm that follows, if there is one
};

// The tensors as a tuple, padded by the first one, since kernels are compiled for few numbers of pointers.
py::tuple pointers(TensorList tensors, int64_t padding) {
  py::tuple all(tensors.size() + padding);
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = tensors[i < tensors.size() ? i : 0];
  }
  return all;
}

// Launch a kernel with its arguments before the constants; see `_Launcher` of `direct.py`.
template <typename... Arguments>
void launch(const py::object& launcher, Arguments&&... arguments) {
  const auto given = py::make_tuple(std::forward<Arguments>(arguments)...);
  const py::object compiled = launcher.attr("compiled");
  if (compiled.is_none()) {
    launcher(*given);
    return;
  }
  const auto all = py::reinterpret_steal<py::object>(
      PySequence_Concat(given.ptr(), py::object(launcher.attr("values")).ptr()));
  if (!all || !py::reinterpret_steal<py::object>(PyObject_CallObject(compiled.ptr(), all.ptr()))) {
    throw py::error_already_set();
  }
}

Tensor norm_weight_of(const ReadPlan& plan, TensorList inputs) { return plan.has_norm ? inputs[2] : Tensor(); }

Outputs compute(const Call& call, TensorList inputs) {
  const auto& plan = *call.plan;
  const auto sources = inputs.slice(plan.weights.size());
  const c10::DeviceGuard on(plan.source.device);
  Outputs outputs;
  {
    py::gil_scoped_release unlocked;  // an allocation may have to wait for the device
    outputs.result = at::empty_like(sources[0]);
    outputs.hidden = plan.has_norm ? at::empty_like(sources[0]) : Tensor();
    outputs.statistics = at::empty(plan.statistics.shape, sources[0].options().dtype(at::kFloat));
  }
  const py::none no_phase;
  launch(
      plan.forward, pointers(sources, plan.padding), inputs[0], inputs[1], no_phase, no_phase, no_phase,
      norm_weight_of(plan, inputs), outputs.result, outputs.hidden, outputs.statistics, plan.tokens, plan.count,
      call.factor(), call.eps, call.norm_eps);
  return outputs;
}

// The gradients from later reads, contiguous, with zeros for each that is missing; nothing if all are missing.
variable_list all_or_none(variable_list grads) {
  const auto is_given = [](const Tensor& grad) { return grad.defined(); };
  const auto given = std::find_if(grads.begin(), grads.end(), is_given);
  if (given == grads.end()) {
    return {};
  }
  if (!std::all_of(grads.begin(), grads.end(), is_given)) {
    std::replace_if(
        grads.begin(), grads.end(), std::not_fn(is_given),
        at::zeros_like(*given, {}, at::MemoryFormat::Contiguous));
  }
  std::transform(grads.begin(), grads.end(), grads.begin(), [](const Tensor& grad) { return grad.contiguous(); });
  return grads;
}

struct Read : torch::autograd::Function<Read> {
  static variable_list forward(AutogradContext* context, TensorList inputs, const c10::intrusive_ptr<Call>& call) {
    const auto outputs = compute(*call, inputs);
    auto saved = inputs.vec();
    saved.insert(saved.end(), {outputs.statistics, outputs.hidden});
    context->save_for_backward(std::move(saved));
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->set_materialize_grads(false);  // missing gradients are undefined, not tensors of zeros
    variable_list returned{outputs.result};
    if (call->needs_weights) {
      returned.push_back(outputs.statistics.select(0, 0));
    }
    if (call->fuse_later_grads) {
      // As outputs of this node, the sources bring the gradients of later reads to its backward pass. An input that is
      // returned becomes a view, which takes longer than an alias.
      variable_list without_grad;
      for (const auto& source : inputs.slice(call->plan->weights.size())) {
        returned.push_back(source.detach());
        if (!source.requires_grad()) {
          without_grad.push_back(returned.back());
        }
      }
      if (!without_grad.empty()) {
        context->mark_non_differentiable(without_grad);
      }
    }
    return returned;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto call = c10::static_intrusive_pointer_cast<Call>(context->saved_data.at("call").toCapsule());
    if (!call->needs_weights) {
      grads.insert(grads.begin() + 1, Tensor());
    }
    const auto saved = context->get_saved_variables();
    std::vector<bool> needed;
    for (size_t i = 0; i < saved.size() - 2; ++i) {
      needed.push_back(context->needs_input_grad(i));
    }
    auto computed = grads_of_inputs(*call, grads, saved, needed);
    for (size_t i = 0; i < needed.size(); ++i) {
      if (!needed[i]) {
        computed[i].reset();
      }
    }
    computed.emplace_back();  // `call` has no gradient
    return computed;
  }

  // Gradients of the inputs from those of the result, the weights and the returned sources, by the kernels or else by
  // `general_backward`.
  static variable_list grads_of_inputs(
      const Call& call, const variable_list& grads, const variable_list& saved, const std::vector<bool>& needed) {
    const auto& plan = *call.plan;
    const bool are_strided = std::all_of(grads.begin(), grads.end(), [](const Tensor& grad) {
      return !grad.defined() || grad.layout() == at::kStrided;
    });
    // If gradients are recorded, this pass will be differentiated itself.
    if (are_strided && !at::GradMode::is_enabled() && are_as_saved(plan, saved)) {
      const auto grad = grads[0].defined() ? grads[0].contiguous() : at::zeros_like(saved[plan.weights.size()]);
      const auto grad_weights = grads[1].defined() ? grads[1].contiguous() : grads[1];
      const auto later = all_or_none({grads.begin() + 2, grads.end()});
      const auto fits = [&](const Tensor& tensor) { return plan.source.fits(tensor); };
      if (fits(grad) && std::all_of(later.begin(), later.end(), fits) &&
          (!grad_weights.defined() || plan.scratch.fits(grad_weights))) {
        return compute_grads(call, grad, grad_weights, later, saved, needed);
      }
    }
    return with_python([&] {
      const auto general =
          plan.general_backward(grads, saved, needed, plan.has_norm, call.eps, call.is_sum, call.norm_eps);
      variable_list computed;
      for (const auto grad : py::cast<py::sequence>(general)) {
        computed.push_back(grad.is_none() ? Tensor() : THPVariable_Unpack(grad.ptr()));
      }
      return computed;
    });
  }

  // Whether saved tensors still are what the forward pass saved: hooks may return others, and `data` may be replaced.
  static bool are_as_saved(const ReadPlan& plan, const variable_list& saved) {
    const auto number = plan.weights.size(), end = saved.size() - 2;
    for (size_t i = 0; i < end; ++i) {
      if (!(i < number ? plan.weights[i] : plan.source).fits(saved[i])) {
        return false;
      }
    }
    return plan.statistics.fits(saved[end]) && (!plan.has_norm || plan.source.fits(saved[end + 1]));
  }

  // Call a function that needs Python's lock, which autograd's threads do not hold.
  template <typename Function>
  static variable_list with_python(const Function& function) {
    py::gil_scoped_acquire lock;
    try {
      return function();
    } catch (py::error_already_set& error) {
      // Autograd carries this kind of error from its thread to the caller's.
      error.restore();
      python_error carried;
      carried.persist();
      throw carried;
    }
  }

  static variable_list compute_grads(
      const Call& call, const Tensor& grad, const Tensor& grad_weights, const variable_list& later,
      const variable_list& saved, const std::vector<bool>& needed) {
    const auto& plan = *call.plan;
    const c10::DeviceGuard on(plan.source.device);
    const auto number = plan.weights.size();
    const auto sources = TensorList(saved).slice(number, plan.count);
    const auto floats = grad.options().dtype(at::kFloat);
    const auto partial = at::empty(plan.partial_shape, floats), scratch = at::empty(plan.scratch.shape, floats);
    const bool needs_sources = std::any_of(needed.begin() + number, needed.end(), [](bool is) { return is; });
    variable_list grad_sources(plan.count);
    if (needs_sources) {
      grad_sources = at::empty(plan.grads_shape, grad.options()).unbind();
    }
    variable_list grads;
    for (size_t i = 0; i < number; ++i) {
      grads.push_back(at::empty_like(saved[i]));
    }
    grads.insert(grads.end(), grad_sources.begin(), grad_sources.end());
    const auto optional = [&](const variable_list& tensors, bool is_given) -> py::object {
      return is_given ? py::object(pointers(tensors, plan.padding)) : py::none();
    };
    return with_python([&] {
      launch(
          plan.backward(grad_weights.defined(), needs_sources, !later.empty()), grad, grad_weights,
          pointers(sources, plan.padding), saved[0], saved[1], saved.back(), norm_weight_of(plan, saved),
          saved[saved.size() - 2], scratch, partial, optional(grad_sources, needs_sources),
          optional(later, !later.empty()), plan.tokens, plan.count, call.factor(), call.norm_eps);
      launch(plan.finish, partial, saved[0], saved[1], grads[0], grads[1], norm_weight_of(plan, grads), plan.programs);
      return grads;
    });
  }
};

// Whether an object is a tensor of a type whose numbers lie at its address, and kernels take it as it is.
bool is_ready(py::handle object, const Kind& kind) {
  return THPVariable_CheckExact(object.ptr()) && kind.fits(THPVariable_Unpack(object.ptr()));
}

// Compute a read; return `None` if the general path must run. `direct.attend` has the documentation.
py::object attend(
    const c10::intrusive_ptr<ReadPlan>& plan, const py::tuple& weights, const py::object& sources, double eps,
    bool is_sum, bool fuse_later_grads, bool needs_weights, double norm_eps) {
  // Python's own functions for lists and tuples take a third of the time of pybind's for sequences.
  const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(sources.ptr(), "sources must be a sequence"));
  if (!items) {
    throw py::error_already_set();
  }
  if (weights.size() != plan->weights.size() || PySequence_Fast_GET_SIZE(items.ptr()) != plan->count) {
    return py::none();
  }
  variable_list inputs;
  inputs.reserve(weights.size() + plan->count);
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!is_ready(weights[i], plan->weights[i])) {
      return py::none();
    }
    inputs.push_back(THPVariable_Unpack(py::handle(weights[i]).ptr()));
  }
  for (Py_ssize_t i = 0; i < plan->count; ++i) {
    const py::handle source = PySequence_Fast_GET_ITEM(items.ptr(), i);
    if (!is_ready(source, plan->source)) {
      return py::none();
    }
    inputs.push_back(THPVariable_Unpack(source.ptr()));
  }
  auto call = c10::make_intrusive<Call>(plan, eps, is_sum, fuse_later_grads, needs_weights, norm_eps);
  if (!at::GradMode::is_enabled()) {
    const auto outputs = compute(*call, inputs);
    return py::make_tuple(outputs.result, needs_weights ? outputs.statistics.select(0, 0) : Tensor(), sources);
  }
  const auto outputs = Read::apply(TensorList(inputs), call);
  const auto depth_weights = needs_weights ? outputs[1] : Tensor();
  if (!fuse_later_grads) {
    return py::make_tuple(outputs[0], depth_weights, sources);
  }
  return py::make_tuple(outputs[0], depth_weights, pointers(TensorList(outputs).slice(needs_weights ? 2 : 1), 0));
}

using KindInPython = std::tuple<at::ScalarType, Shape, at::Device>;

Kind kind_of(const KindInPython& kind) { return {std::get<0>(kind), std::get<1>(kind), std::get<2>(kind)}; }

// Make a plan from the attributes of the `ReadSizes` in `direct.py`.
c10::intrusive_ptr<ReadPlan> make_plan(const py::object& attributes, const py::object& general_backward) {
  auto plan = c10::make_intrusive<ReadPlan>();
  const auto read = [&](const char* name, auto& field) {
    field = attributes.attr(name).cast<std::decay_t<decltype(field)>>();
  };
  plan->source = kind_of(attributes.attr("source_kind").cast<KindInPython>());
  plan->statistics = {at::kFloat, attributes.attr("statistics_shape").cast<Shape>(), plan->source.device};
  plan->scratch = {at::kFloat, attributes.attr("scratch_shape").cast<Shape>(), plan->source.device};
  for (const auto kind : attributes.attr("weight_kinds")) {
    plan->weights.push_back(kind_of(kind.cast<KindInPython>()));
  }
  read("has_norm", plan->has_norm);
  read("tokens", plan->tokens);
  read("count", plan->count);
  read("padding", plan->padding);
  read("programs", plan->programs);
  read("partial_shape", plan->partial_shape);
  read("grads_shape", plan->grads_shape);
  read("forward", plan->forward);
  read("backward", plan->backward);
  read("finish", plan->finish);
  plan->general_backward = general_backward;
  return plan;
}

}  // namespace attnres

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using attnres::ReadPlan;
  py::class_<ReadPlan, c10::intrusive_ptr<ReadPlan>>(module, "ReadPlan", py::module_local())
      .def(py::init(&attnres::make_plan))
      .def("attend", torch::wrap_pybind_function(attnres::attend));
}
