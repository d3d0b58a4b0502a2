// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Interrupts: MSI-X vectors, each an eventfd of the virtual machine.
//!
//! QEMU emulates the MSI-X table with its masks, and keeps interrupts of masked vectors pending. The device keeps
//! interrupts of vectors without an eventfd pending.

use std::os::fd::OwnedFd;

use rustix::fs::{fcntl_getfl, fcntl_setfl, OFlags};
use tracing::trace;

/// Number of vectors of a device.
pub const VECTORS: usize = 32;

/// Interrupt vectors of a device.
#[derive(Debug, Default)]
pub struct Interrupts {
    eventfds: [Option<OwnedFd>; VECTORS],
    pending: u64,
    raised: u64,
}

impl Interrupts {
    /// Raises a vector. A vector that does not exist is ignored.
    pub fn raise(&mut self, vector: usize) {
        let Some(eventfd) = self.eventfds.get(vector) else {
            return;
        };
        self.raised += 1;
        trace!(vector, "interrupt");
        // A write to an eventfd fails only if its counter is at the maximum. The interrupt is then already pending.
        let is_written = eventfd
            .as_ref()
            .is_some_and(|fd| rustix::io::write(fd, &1u64.to_ne_bytes()).is_ok());
        if !is_written {
            self.pending |= 1 << vector;
        }
    }

    /// Resets the number of interrupts.
    pub fn begin_account(&mut self) {
        self.raised = 0;
    }

    /// Returns the number of interrupts so far.
    pub fn raised(&self) -> u64 {
        self.raised
    }

    /// Sets or removes the eventfd of a vector.
    pub fn connect(&mut self, vector: usize, eventfd: Option<OwnedFd>) {
        let Some(slot) = self.eventfds.get_mut(vector) else {
            return;
        };
        // A write must not block the device.
        *slot = eventfd.filter(|fd| {
            let flags = fcntl_getfl(fd);
            flags
                .and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK))
                .is_ok()
        });
        if slot.is_some() && self.pending & (1 << vector) != 0 {
            self.pending &= !(1 << vector);
            self.raise(vector);
        }
    }

    /// Removes all eventfds.
    pub fn disconnect(&mut self) {
        self.eventfds = Default::default();
        self.pending = 0;
    }

    /// Function-level reset: clears pending interrupts. Eventfds belong to the virtual machine, and remain.
    pub fn reset(&mut self) {
        self.pending = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{eventfd, EventfdFlags};

    fn count(fd: &OwnedFd) -> Option<u64> {
        let mut count = [0; 8];
        rustix::io::read(fd, &mut count).ok()?;
        Some(u64::from_ne_bytes(count))
    }

    #[test]
    fn interrupt_raised_before_connection_is_delivered() {
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let mut interrupts = Interrupts::default();
        interrupts.raise(3);
        interrupts.connect(2, fd.try_clone().ok());
        assert_eq!(count(&fd), None);
        interrupts.connect(3, fd.try_clone().ok());
        assert_eq!(count(&fd), Some(1));
        interrupts.connect(3, fd.try_clone().ok());
        assert_eq!(count(&fd), None);
    }

    #[test]
    fn unknown_vector_is_ignored() {
        let mut interrupts = Interrupts::default();
        interrupts.raise(VECTORS);
        interrupts.connect(VECTORS, None);
        assert_eq!(interrupts.raised(), 0);
    }
}
