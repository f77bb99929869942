// Sparse tensors: what makes them of indices and values, and takes them apart. It looks at no numbers, so what torch has
// for the CPU is right for the device, too. Only what sums repeated indices does: the host waits for it, as CUDA's does.
// The gradient of an embedding bag may be sparse, so it is made of operations on the device.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_embedding_bag_backward_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <torch/library.h>

#include "simulator.h"

namespace sim {

static at::Tensor coalesce(const at::Tensor& self) {
  const at::Tensor host = at::_sparse_coo_tensor_unsafe(self._indices().cpu(), self._values().cpu(), self.sizes());
  const at::Tensor summed = host.coalesce();
  const at::Tensor indices = summed._indices().to(self.device()), values = summed._values().to(self.device());
  return at::_sparse_coo_tensor_unsafe(indices, values, self.sizes(), self.options(), /*is_coalesced=*/true);
}

static torch::Library sparse(torch::Library::IMPL, "aten", key() == c10::DispatchKey::CUDA
                             ? c10::DispatchKey::SparseCUDA : c10::DispatchKey::SparsePrivateUse1, __FILE__, __LINE__);
static torch::Library dense(torch::Library::IMPL, "aten", key(), __FILE__, __LINE__);
static const bool sparse_registered = [] {
  namespace native = at::native;
  sparse.impl("_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(native::new_with_dims_and_tensor_sparse_symint));
  sparse.impl("_indices", TORCH_FN(native::_indices_sparse));
  sparse.impl("_values", TORCH_FN(native::_values_sparse));
  sparse.impl("_nnz", TORCH_FN(native::_nnz_sparse));
  sparse.impl("_coalesced_", TORCH_FN(native::_coalesced_sparse_));
  sparse.impl("_coalesce", TORCH_FN(coalesce));
  sparse.impl("is_coalesced", TORCH_FN(native::is_coalesced_sparse));
  sparse.impl("indices", TORCH_FN(native::indices_sparse));
  sparse.impl("values", TORCH_FN(native::values_sparse));
  sparse.impl("sparse_dim", TORCH_FN(native::sparse_dim_sparse));
  sparse.impl("dense_dim", TORCH_FN(native::dense_dim_sparse));
  dense.impl("_embedding_bag_backward", TORCH_FN(native::_embedding_bag_backward_symint));
  return true;
}();

}  // namespace sim
