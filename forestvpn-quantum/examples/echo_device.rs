//! The second door: a `Device` in an event loop of your own, without TUN, root or a datapath thread.
//!
//! Two devices talk over two loopback sockets. One answers every inner packet with source and destination
//! swapped; the other sends three and prints what comes back.
//!
//! `cargo run -p forestvpn-quantum --example echo_device`

use std::error::Error;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant as StdInstant, SystemTime};

use forestvpn_quantum::batch::{Ecn, Endpoint, Envelope, Frame, Outbox, Received, Span};
use forestvpn_quantum::config::{AllowedIp, DeviceUpdate, PeerUpdate};
use forestvpn_quantum::offload::VnetHdr;
use forestvpn_quantum::time::{Instant, Now, OsEntropy};
use forestvpn_quantum::{Device, DeviceConfig, PrivateKey, PublicKey};

/// Where the device puts datagrams: straight onto a socket.
struct Wire {
    socket: UdpSocket,
    slot: Vec<u8>,
    to: Option<SocketAddr>,
}

impl Outbox for Wire {
    fn reserve(&mut self, envelope: &Envelope, stride: usize, count: usize) -> Option<&mut [u8]> {
        self.to = Some(envelope.to.remote);
        // One datagram at a time is what this example sends; a real outbox has room for trains.
        (count == 1).then_some(())?;
        self.slot.get_mut(..stride)
    }
    fn commit(&mut self, len: usize) {
        if let (Some(to), Some(datagram)) = (self.to, self.slot.get(..len)) {
            // A datagram that cannot be sent is a lost datagram: the protocol copes.
            let _ = self.socket.send_to(datagram, to);
        }
    }
}

/// One end: a device, its socket and its clock.
struct End {
    device: Device,
    wire: Wire,
    started: StdInstant,
}

impl End {
    fn new(
        key: &PrivateKey,
        peer: PublicKey,
        allowed: &str,
        socket: UdpSocket,
    ) -> Result<Self, Box<dyn Error>> {
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        let mut end = Self {
            device: Device::new(DeviceConfig::default(), Box::new(OsEntropy)),
            wire: Wire { socket, slot: vec![0; 65_535], to: None },
            started: StdInstant::now(),
        };
        let mut peer = PeerUpdate::new(peer);
        peer.allowed_ips = vec![AllowedIp { net: allowed.parse()?, remove: false }];
        let update =
            DeviceUpdate { private_key: Some(Some(key.clone())), peers: vec![peer], ..Default::default() };
        let now = end.now();
        end.device.configure(&update, now, &mut end.wire)?;
        end.device.set_up(true, now, &mut end.wire);
        Ok(end)
    }

    fn now(&self) -> Now {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Now { mono: Instant::ZERO.after(self.started.elapsed()), unix }
    }

    /// One inner IP packet goes out.
    fn send(&mut self, packet: &mut [u8]) {
        let now = self.now();
        // A discard is counted by the device; there is nothing to do about it here.
        let _ = self.device.outbound(now, Frame { hdr: VnetHdr::default(), bytes: packet }, &mut self.wire);
    }

    /// One turn of the loop: what arrived, then what is due. Gives the inner packets that came out.
    fn turn(&mut self) -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
        let mut buffer = [0; 2048];
        let mut spans: Vec<Span> = Vec::new();
        let now = self.now();
        match self.wire.socket.recv_from(&mut buffer) {
            Ok((len, from)) => {
                let from = Endpoint::new(from);
                let rx = Received { bytes: &mut buffer[..len], stride: len, from, ecn: Ecn::NotEct };
                self.device.inbound(now, rx, &mut spans, &mut self.wire);
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(e) => return Err(e.into()),
        }
        if self.device.poll_timeout().is_some_and(|at| at <= now.mono) {
            self.device.handle_timeout(now, &mut self.wire);
        }
        let packet = |s: &Span| buffer.get(s.at as usize..s.at as usize + usize::from(s.len));
        Ok(spans.iter().filter_map(packet).map(<[u8]>::to_vec).collect())
    }
}

/// An IPv4 packet (protocol 253: for experiments) from 10.0.0.1 to 10.0.0.2.
fn packet(payload: &[u8]) -> Vec<u8> {
    let len = 20 + payload.len() as u16;
    let mut p =
        vec![0x45, 0, (len >> 8) as u8, len as u8, 0, 0, 0, 0, 64, 253, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    p.extend(payload);
    p
}

fn main() -> Result<(), Box<dyn Error>> {
    let (alice, bob) = (PrivateKey::new([1; 32]), PrivateKey::new([2; 32]));
    let bob_socket = UdpSocket::bind("127.0.0.1:0")?;
    let bob_addr = bob_socket.local_addr()?;
    let mut client = End::new(&alice, bob.public_key(), "10.0.0.2/32", UdpSocket::bind("127.0.0.1:0")?)?;
    let mut echo = End::new(&bob, alice.public_key(), "10.0.0.1/32", bob_socket)?;

    // The client knows where the other is; the echo learns it from the first authenticated packet.
    let mut peer = PeerUpdate::new(bob.public_key());
    peer.endpoint = Some(bob_addr);
    let now = client.now();
    let update = DeviceUpdate { peers: vec![peer], ..Default::default() };
    client.device.configure(&update, now, &mut client.wire)?;

    let words: [&[u8]; 3] = [b"one", b"two", b"three"];
    words.iter().for_each(|w| client.send(&mut packet(w)));

    let mut heard = 0;
    for _ in 0..200 {
        for mut p in echo.turn()? {
            let (source, destination) = p[12..20].split_at_mut(4);
            source.swap_with_slice(destination);
            echo.send(&mut p);
        }
        for p in client.turn()? {
            println!("came back: {}", String::from_utf8_lossy(&p[20..]));
            heard += 1;
        }
        if heard == words.len() {
            let peers = client.device.snapshot().peers;
            println!("sent {} and received {} bytes of UDP", peers[0].tx_bytes, peers[0].rx_bytes);
            return Ok(());
        }
    }
    Err(format!("only {heard} of {} packets came back within the time", words.len()).into())
}
