// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Errors of clusters, nodes and commands, with the log or file to look at next.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::machine::kernel::Series;

/// Result with an error of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure of a cluster, a node or a command.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The harness was started outside kite's root file system.
    #[error(
        "clusters run inside kite's root file system: use scripts/in-root, after scripts/setup"
    )]
    NotInRoot,
    /// `FABRIC` or `--fabric` names no fabric.
    #[error("\"{0}\" is not a fabric; expected one of: connectx, rxe")]
    UnknownFabric(String),
    /// The software ConnectX is required and was not built.
    #[error("software ConnectX is not built: run make connectx")]
    NoConnectx,
    /// The operation is possible with software ConnectXs only.
    #[error("the RNIC of this node is no software ConnectX")]
    NotConnectx,
    /// The software ConnectX did not start.
    #[error("the software ConnectX ended; see {}", .0.display())]
    Connectx(PathBuf),
    /// The software ConnectX rejected a request.
    #[error("software ConnectX replied: {0}")]
    Control(String),
    /// `KITE_KERNEL` names no kernel.
    #[error("\"{0}\" is not a kernel; expected: stock, debug, or a series such as 7.2")]
    UnknownKernel(String),
    /// The set-up has not prepared this kernel series.
    #[error("kernel series {0} is not prepared: run scripts/setup {0}")]
    NoSeries(Series),
    /// The debug kernel is required and was not built.
    #[error("debug kernel is not built: run make test-debug (scripts/setup.d/debug)")]
    NoDebugKernel,
    /// The minimal Debian for the tests of packages was not made.
    #[error("no Debian host is prepared: run scripts/setup.d/packaging")]
    NoMachine,
    /// A cluster of no nodes, or of more than its network has addresses for.
    #[error("a cluster has 1 to 254 nodes, not {0}")]
    Nodes(usize),
    /// An operation on the host failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation.
        what: String,
        /// Its error.
        source: io::Error,
    },
    /// A node stopped, or was not ready in time.
    #[error("{node} did not boot: {why}; its console:\n{log}\n(all of it: {})", console.display())]
    Boot {
        /// The node.
        node: String,
        /// The reason.
        why: String,
        /// The fault or the last lines of its console.
        log: String,
        /// The console log.
        console: PathBuf,
    },
    /// The connection to a node broke: it was killed, reset, or its kernel died.
    #[error("{node} is not reachable: {why}")]
    Unreachable {
        /// The node.
        node: String,
        /// The message of ssh or QEMU.
        why: String,
    },
    /// A command, or the awaited part of its output, exceeded its timeout.
    #[error(
        "{node}: `{}`: not within {limit:?}; so far it wrote:\n{output}",
        brief(command)
    )]
    Timeout {
        /// The node.
        node: String,
        /// The command.
        command: String,
        /// The timeout.
        limit: Duration,
        /// Its output until then.
        output: String,
    },
    /// A command that must succeed failed.
    #[error("{node}: `{}` ended with status {status}:\n{output}", brief(command))]
    Failed {
        /// The node.
        node: String,
        /// The command.
        command: String,
        /// Its exit status.
        status: i32,
        /// Its output.
        output: String,
    },
    /// QEMU rejected a command or sent an unexpected reply.
    #[error("QEMU command {command}: {why}")]
    Qemu {
        /// The QMP command.
        command: String,
        /// Its reply.
        why: String,
    },
    /// An unloaded module left unreferenced objects.
    #[error("{node}: memory was leaked:\n{objects}")]
    Leak {
        /// The node.
        node: String,
        /// The objects, as kmemleak describes them.
        objects: String,
    },
    /// Kernels of the cluster reported faults.
    #[error("the kernel reported a fault\n{0}")]
    Fault(String),
}

/// Maximum lines of a command in a message.
const LINES: usize = 12;

/// Returns the first and last lines of a command: a whole script would hide its output.
fn brief(command: &str) -> String {
    let lines: Vec<&str> = command.lines().collect();
    let Some(hidden) = lines.len().checked_sub(LINES).filter(|hidden| *hidden > 0) else {
        return command.into();
    };
    let (first, last) = (&lines[..LINES / 2], &lines[hidden + LINES / 2..]);
    format!(
        "{}\n… {hidden} lines …\n{}",
        first.join("\n"),
        last.join("\n")
    )
}

/// Formats as `Display`: the test harness prints errors by `Debug`, and console lines must remain lines.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Adds the failed operation to an I/O error.
pub(crate) trait Context<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io {
            what: what(),
            source: source.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_command_is_shortened_to_both_ends() {
        assert_eq!(brief("a\nb"), "a\nb");
        let lines: Vec<String> = (1..=13).map(|i| i.to_string()).collect();
        assert_eq!(
            brief(&lines.join("\n")),
            "1\n2\n3\n4\n5\n6\n… 1 lines …\n8\n9\n10\n11\n12\n13"
        );
    }
}
