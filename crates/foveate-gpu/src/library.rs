//! The libraries of NVIDIA's that are loaded at run time: what each is called, what it is for, and
//! how to get it. Finding and opening them is [`crate::loader`]'s.

/// Folders or files to look in first.
pub const LIBRARIES_VARIABLE: &str = "FOVEATE_CUDA_LIBRARIES";

/// A library of NVIDIA's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Library {
    /// The driver's user half, `libcuda`.
    Driver,
    /// The run-time compiler.
    Nvrtc,
    /// Matrix products.
    CublasLt,
    /// Collectives.
    Nccl,
    /// What the driver tells of clocks and power, `libnvidia-ml`.
    Nvml,
}

impl Library {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Driver, Self::Nvrtc, Self::CublasLt, Self::Nccl, Self::Nvml];

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "the NVIDIA driver",
            Self::Nvrtc => "NVRTC",
            Self::CublasLt => "cuBLASLt",
            Self::Nccl => "NCCL",
            Self::Nvml => "NVML",
        }
    }

    /// What is done with it.
    pub fn purpose(self) -> &'static str {
        match self {
            Self::Driver => "to run on a GPU",
            Self::Nvrtc => "to compile kernels",
            Self::CublasLt => "for the matrix products of training on a GPU",
            Self::Nccl => "to train on several GPUs",
            Self::Nvml => "to report clocks and power beside timings",
        }
    }

    /// How to get it.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Driver => "install an NVIDIA driver of version 580 or newer",
            Self::Nvrtc => {
                "`pip install nvidia-cuda-nvrtc` in the active environment, install the CUDA \
                 toolkit, or point FOVEATE_CUDA_LIBRARIES at a folder that has libnvrtc.so.13"
            }
            Self::CublasLt => "`pip install nvidia-cublas` or install the CUDA toolkit",
            Self::Nccl => "`pip install nvidia-nccl-cu13` or install NCCL",
            Self::Nvml => {
                "it comes with the NVIDIA driver; a container gets it with the capability `utility`"
            }
        }
    }

    /// How to get it for a driver of CUDA `major`, in the form of a package of pip's.
    pub(crate) fn package(self, major: u32) -> String {
        let stem = match self {
            Self::Driver | Self::Nvml => "nvidia-driver",
            Self::Nvrtc => "nvidia-cuda-nvrtc",
            Self::CublasLt => "nvidia-cublas",
            Self::Nccl => "nvidia-nccl",
        };
        format!("{stem}-cu{major}")
    }

    /// File names, the preferred one first.
    pub(crate) fn file_names(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1", "nvcuda.dll"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
            Self::Nccl => &["libnccl.so.2", "libnccl.so"],
            Self::Nvml => &["libnvidia-ml.so.1", "nvml.dll"],
        }
    }

    /// Whether it is a part of the driver, which no wheel and no toolkit has.
    pub(crate) fn is_of_driver(self) -> bool {
        matches!(self, Self::Driver | Self::Nvml)
    }
}
