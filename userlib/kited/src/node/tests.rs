// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Tests of a daemon without a cluster; `tests/cluster` tests daemons with a mock kernel.

use super::*;
use crate::kernel::{KernelSession, ResumedSession};
use crate::membership::Identity;
use crate::protocol::{example, KernelInfo};

/// Kernel of a node that does not join.
struct IdleKernel;

impl Kernel for IdleKernel {
    fn info(&self) -> Result<KernelInfo> {
        Ok(example::kernel(1))
    }

    fn rnic_name(&self) -> String {
        "idle".into()
    }

    fn resume(
        &mut self,
        _: Option<u64>,
        _: UnboundedSender<KernelEvent>,
    ) -> Result<Option<ResumedSession>> {
        Ok(None)
    }

    fn join(&self, _: Identity, _: UnboundedSender<KernelEvent>) -> Result<Box<dyn KernelSession>> {
        bail!("no cluster")
    }
}

fn config(role: Role) -> Config {
    let second = Duration::from_secs(1);
    Config {
        role,
        key: None,
        timing: Timing {
            heartbeat_interval: second,
            dead_after: 3 * second,
        },
        checkpoint: None,
        state: None,
        forget_after: None,
        control_directory: None,
    }
}

#[tokio::test]
async fn daemon_whose_store_task_ends_fails() {
    let role = Role::Store(StoreConfig::without_hosts());
    let daemon = run(config(role), IdleKernel, |_, _| {}, std::future::pending());
    let ended = timeout(Duration::from_secs(10), daemon).await;
    let error = ended.expect("daemon ends").unwrap_err();
    assert_eq!(error.to_string(), "task of the connections ended");
}

#[tokio::test]
async fn panic_of_a_detached_task_is_an_error_with_its_message() {
    let mut connector = JoinSet::new();
    connector.spawn(join_detached(tokio::spawn(async {
        panic!("invalid reply")
    })));
    let error = connector_error(connector.join_next().await.unwrap());
    let text = format!("{error:#}");
    assert!(
        text.starts_with("task of the connections failed: "),
        "{text}"
    );
    assert!(text.contains("invalid reply"), "{text}");
}
