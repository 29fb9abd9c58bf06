//! Strided matrices as cuBLASLt takes them: column-major, a distance from a column to the next.
//!
//! A row-major matrix is the transpose of a column-major one in the same memory. So a product
//! with a row-major result is asked for as `cᵀ = bᵀ · aᵀ`, and each factor that is not in the
//! order of the result is marked as transposed. This way a bias along the columns of a row-major
//! result lies along the library's rows, which is where it takes one.

use foveate_tensor::Layout;

use crate::error::GpuError;
use crate::tensor::DeviceTensor;

/// Which of a matrix's axes has neighbours side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// The elements of a row.
    Rows,
    /// Those of a column.
    Columns,
}

/// Where the matrices of a batch lie: in memory each is column-major `[rows, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// How the tensor's own axes lie; [`Order::Rows`] makes `rows` its columns.
    pub order: Order,
    /// Neighbours side by side.
    pub rows: usize,
    /// Groups of them.
    pub columns: usize,
    /// Elements from a column to the next.
    pub leading: usize,
    /// Elements from a matrix to the next; 0 shares one.
    pub batch_stride: usize,
}

impl Matrix {
    /// The matrices of `tensor [batch, rows, columns]`; row-major where both orders describe it.
    ///
    /// # Errors
    /// When neither order does.
    pub fn of(name: &str, tensor: &DeviceTensor<3>) -> Result<Self, GpuError> {
        let Layout { shape, strides, groups, .. } = tensor.layout;
        if groups.is_some() {
            return Err(GpuError::argument(format!(
                "{name} has an axis in groups, which no distance between rows describes; take one \
                 group at a time"
            )));
        }
        let [batch, rows, columns] = shape;
        let [between, row, column] = strides;
        let batch_stride = if batch > 1 { between } else { 0 };
        // The strides of an axis of one entry mean nothing.
        let dense = |inner: usize, stride: usize| inner <= 1 || stride == 1;
        let leading = |outer: usize, stride: usize, inner: usize| {
            if outer > 1 { stride } else { inner.max(1) }
        };
        let by_rows = leading(rows, row, columns);
        if dense(columns, column) && by_rows >= columns {
            let (rows, columns, order) = (columns, rows, Order::Rows);
            return Ok(Self { order, rows, columns, leading: by_rows, batch_stride });
        }
        let by_columns = leading(columns, column, rows);
        if dense(rows, row) && by_columns >= rows {
            let order = Order::Columns;
            return Ok(Self { order, rows, columns, leading: by_columns, batch_stride });
        }
        Err(GpuError::argument(format!(
            "{name} is {rows} x {columns} with strides {row} and {column}; one of them must be 1 \
             and the other at least the length of that axis: copy it into such memory first"
        )))
    }
}

#[cfg(test)]
mod tests {
    use foveate_tensor::DType;

    use super::*;

    fn matrix(shape: [usize; 3], strides: [usize; 3]) -> Result<Matrix, String> {
        let layout = Layout::strided(shape, strides, 0);
        let tensor = DeviceTensor { address: 0x1000, dtype: DType::F32, layout };
        Matrix::of("a", &tensor).map_err(|e| e.to_string())
    }

    #[test]
    fn rows_and_columns_side_by_side_are_taken_with_any_distance_between_them() {
        let of = |order, rows, columns, leading, batch_stride| {
            Ok(Matrix { order, rows, columns, leading, batch_stride })
        };
        assert_eq!(matrix([2, 3, 5], [90, 7, 1]), of(Order::Rows, 5, 3, 7, 90));
        assert_eq!(matrix([2, 3, 5], [0, 5, 1]), of(Order::Rows, 5, 3, 5, 0));
        assert_eq!(matrix([2, 3, 5], [15, 1, 3]), of(Order::Columns, 3, 5, 3, 15));
        // A vector is a matrix in either direction, whatever lies between its elements.
        assert_eq!(matrix([1, 1, 5], [9, 9, 1]), of(Order::Rows, 5, 1, 5, 0));
        assert_eq!(matrix([1, 1, 5], [9, 9, 4]), of(Order::Columns, 1, 5, 4, 0));
        assert_eq!(matrix([1, 5, 1], [9, 4, 9]), of(Order::Rows, 1, 5, 4, 0));
        assert_eq!(matrix([1, 5, 1], [9, 1, 9]), of(Order::Rows, 1, 5, 1, 0));
        assert_eq!(matrix([1, 1, 1], [9, 9, 9]), of(Order::Rows, 1, 1, 1, 0));
    }

    #[test]
    fn rows_that_overlap_and_elements_apart_in_both_axes_are_refused() {
        for strides in [[0, 10, 2], [0, 4, 1], [0, 0, 1], [0, 2, 3], [0, 1, 2]] {
            let said = matrix([2, 3, 5], strides).unwrap_err();
            let [_, row, column] = strides;
            let expected = format!("a is 3 x 5 with strides {row} and {column}; one of them must");
            assert!(said.starts_with(&expected), "{said}");
        }
    }
}
