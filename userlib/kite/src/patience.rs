// SPDX-License-Identifier: GPL-2.0 OR MIT
//! How long to look for what is to come before sleeping.
//!
//! To sleep takes a system call, and to be woken takes longer than most requests; to look for what takes long
//! takes a processor. So it is learnt from the waits before.

/// How long to look for completions before sleeping: longer if that has paid, shorter if not.
#[derive(Debug)]
pub(crate) struct Patience {
    looks: u32,
}

impl Patience {
    const MIN: u32 = 16;
    const MAX: u32 = 1 << 14;

    pub(crate) fn new() -> Self {
        Self { looks: 1 << 10 }
    }

    /// Looks for a while; returns whether there was something.
    pub(crate) fn look(&mut self, mut is_there: impl FnMut() -> bool) -> bool {
        for _ in 0..self.looks {
            if is_there() {
                self.looks = (self.looks * 2).min(Self::MAX);
                return true;
            }
            std::hint::spin_loop();
        }
        self.looks = (self.looks / 2).max(Self::MIN);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_grows_when_it_pays_and_shrinks_when_not() {
        let mut patience = Patience::new();
        let first = patience.looks;
        assert!(patience.look(|| true));
        assert!(patience.looks > first);
        for _ in 0..40 {
            assert!(!patience.look(|| false));
        }
        assert_eq!(patience.looks, Patience::MIN);
        for _ in 0..40 {
            assert!(patience.look(|| true));
        }
        assert_eq!(patience.looks, Patience::MAX);
    }
}
