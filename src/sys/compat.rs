// SPDX-License-Identifier: GPL-2.0

//! Differences between the Rust interfaces of the supported kernel series.
//!
//! `Kbuild` sets `cfg(kernel_7_3)` for 7.3 and later. Other files use no `cfg` for kernel versions. An item
//! can be removed when the last series without the newer interface is dropped.

use kernel::module_param::ModuleParamAccess;

/// Returns the value of a module parameter. Before 7.3 `value` returned a reference.
pub(crate) fn read_parameter<T: Copy>(param: &ModuleParamAccess<T>) -> T {
    #[cfg(kernel_7_3)]
    {
        param.value()
    }
    #[cfg(not(kernel_7_3))]
    {
        *param.value()
    }
}

/// Returns the `THIS_MODULE` of kite. Before 7.3 the macro `module!` defined a static with the same name.
pub(crate) const fn this_module() -> *mut kernel::bindings::module {
    #[cfg(kernel_7_3)]
    {
        kernel::module::this_module::<crate::Kite>().as_ptr()
    }
    #[cfg(not(kernel_7_3))]
    {
        crate::THIS_MODULE.as_ptr()
    }
}

/// Keeps the module loaded until the next boot: its code may still run for an object that could not be
/// destroyed.
pub(crate) fn forbid_unload() {
    // SAFETY: The module is live while its code runs.
    unsafe { kernel::bindings::__module_get(this_module()) };
}

/// Full memory barrier between processors. Since 7.3 `smp_mb` takes the kind of barrier as an argument.
pub(crate) fn smp_mb() {
    #[cfg(kernel_7_3)]
    {
        kernel::sync::barrier::smp_mb(kernel::sync::barrier::Full)
    }
    #[cfg(not(kernel_7_3))]
    {
        kernel::sync::barrier::smp_mb()
    }
}

/// Returns a limit of `struct ib_device_attr`, or 0 if `value` is negative. The limits were signed before
/// 7.3.
pub(crate) fn device_limit(value: impl TryInto<u32>) -> u32 {
    value.try_into().unwrap_or(0)
}
