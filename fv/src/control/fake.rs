//! A device that keeps what it is told and moves no packet: the other side of the control socket in tests.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use forestvpn_quantum::config::{DeviceSnapshot, DeviceUpdate, PeerSnapshot, PeerUpdate};
use nix::errno::Errno;

use super::{Control, Refusal};

/// The port that is always in use.
pub(super) const BUSY_PORT: u16 = 999;

#[derive(Default)]
pub(super) struct Fake {
    device: Mutex<DeviceSnapshot>,
    gone: AtomicBool,
}

impl Fake {
    /// From now on the tunnel is gone.
    pub(super) fn end(&self) {
        self.gone.store(true, Ordering::SeqCst);
    }

    fn check(&self) -> Result<(), Refusal> {
        if self.gone.load(Ordering::SeqCst) {
            return Err(Refusal { errno: Errno::EIO, text: "gone".into() });
        }
        Ok(())
    }
}

impl Control for Fake {
    fn configure(&self, update: DeviceUpdate) -> Result<(), Refusal> {
        self.check()?;
        if update.listen_port == Some(BUSY_PORT) {
            return Err(Refusal { errno: Errno::EADDRINUSE, text: "port in use".into() });
        }
        let mut device = self.device.lock().expect("no panic before");
        if let Some(key) = update.private_key {
            device.private_key = key;
        }
        if let Some(port) = update.listen_port {
            device.listen_port = if port == 0 { 40000 } else { port };
        }
        device.fwmark = update.fwmark.unwrap_or(device.fwmark);
        if update.replace_peers {
            device.peers.clear();
        }
        update.peers.iter().for_each(|peer| apply(&mut device, peer));
        Ok(())
    }

    fn snapshot(&self) -> Result<DeviceSnapshot, Refusal> {
        self.check()?;
        Ok(self.device.lock().expect("no panic before").clone())
    }

    fn report(&self) -> Result<String, Refusal> {
        self.check().map(|()| "fv=0\n".to_owned())
    }
}

fn apply(device: &mut DeviceSnapshot, update: &PeerUpdate) {
    let found = device.peers.iter().position(|peer| peer.public_key == update.public_key);
    if update.remove {
        found.map(|index| device.peers.remove(index));
        return;
    }
    if found.is_none() && update.update_only {
        return;
    }
    for change in &update.allowed_ips {
        let mine = |key| key == update.public_key;
        let touched = device.peers.iter_mut().filter(|peer| !change.remove || mine(peer.public_key));
        touched.for_each(|peer| peer.allowed_ips.retain(|net| *net != change.net));
    }
    let index = found.unwrap_or_else(|| {
        device.peers.push(PeerSnapshot {
            public_key: update.public_key,
            preshared_key: None,
            endpoint: None,
            last_handshake: None,
            tx_bytes: 0,
            rx_bytes: 0,
            persistent_keepalive: 0,
            allowed_ips: Vec::new(),
        });
        device.peers.len() - 1
    });
    let peer = &mut device.peers[index];
    if let Some(key) = &update.preshared_key {
        peer.preshared_key.clone_from(key);
    }
    peer.endpoint = update.endpoint.or(peer.endpoint);
    peer.persistent_keepalive = update.persistent_keepalive.unwrap_or(peer.persistent_keepalive);
    if update.replace_allowed_ips {
        peer.allowed_ips.clear();
    }
    peer.allowed_ips
        .extend(update.allowed_ips.iter().filter(|change| !change.remove).map(|change| change.net));
}
